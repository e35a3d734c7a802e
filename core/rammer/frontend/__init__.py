"""Translation from ONNX files to Graphs, and from Graphs to tensor expressions."""
