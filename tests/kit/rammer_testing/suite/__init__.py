"""ONNX's backend tests (``onnx.backend.test``) on a device, with verdicts: passed, host operators, declined, wrong."""
