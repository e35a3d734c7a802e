/* Run compiled files of rammer from C and C++, without Python.
 *
 * A file is opened, arrays are bound to its inputs and outputs, and each run copies the inputs to the device, computes, and copies
 * the outputs back. The machine code in the file is executed as it is, so the caller must trust the file. docs/files.md describes
 * trust, docs/howto/deploy.md the use and the limits.
 *
 * Build: cc -c rammer.c; link with -ldl. The drivers (libcuda.so.1, libOpenCL.so.1) are loaded when a file is opened.
 *
 * A model may be used by one thread at a time. Different models are independent. */
#ifndef RAMMER_H
#define RAMMER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  RAMMER_OK = 0,
  RAMMER_BAD_FILE = 1,      /* the file cannot be read, is damaged or malformed */
  RAMMER_UNSUPPORTED = 2,   /* the file is valid, but only Python runs it */
  RAMMER_NOT_TRUSTED = 3,   /* the caller does not trust the file, or requires a signature */
  RAMMER_NO_DEVICE = 4,     /* a driver is missing, or no device runs the machine code */
  RAMMER_DEVICE_FAILED = 5, /* a call of the driver failed */
  RAMMER_BAD_CALL = 6,      /* an argument of the caller is invalid */
  RAMMER_NO_MEMORY = 7      /* memory of the host is insufficient */
} rammer_status;

/* How to open a file; zero is the default of each field. */
typedef struct {
  int trust;             /* 1: execute the machine code of the file, which can do all that this process can do */
  const char *trust_key; /* a public key: signatures are not checked in C, so this is refused with RAMMER_NOT_TRUSTED */
  const char *device;    /* "cuda" or "rocm"; NULL: the first variant of the file that a device here runs */
  int check_only;        /* 1: check the file and read its ports; no driver is loaded, and rammer_run is refused */
} rammer_options;

/* An input or output: a dense array in row-major order. The strings and extents live as long as the model. */
typedef struct {
  const char *name;
  const char *type; /* element type and greatest extents, for example f32[1,3,224,224] */
  size_t rank;
  const int64_t *shape; /* at the current lengths, as bytes */
  size_t element_bytes;
  size_t bytes;
} rammer_port;

/* A dimension that the model was compiled for a range of: low, low + step, ... high. */
typedef struct {
  const char *name;
  int64_t low, high, step;
  int64_t value; /* the current length; high when the file is opened */
} rammer_length;

typedef struct rammer_model rammer_model;

/* Open a compiled file. On success *model must be closed; on failure it is NULL, and rammer_error describes the reason. */
rammer_status rammer_open(const char *path, const rammer_options *options, rammer_model **model);

/* Return the ports and store their number. */
const rammer_port *rammer_inputs(const rammer_model *model, size_t *count);
const rammer_port *rammer_outputs(const rammer_model *model, size_t *count);

/* Store the dimension of a range with this index, counted from 0, and return 1; return 0 after the last one. */
int rammer_length_at(const rammer_model *model, size_t index, rammer_length *into);

/* Set the length of a dimension for the next runs. The extents of the ports change; a port whose bytes change must be bound again. */
rammer_status rammer_set_length(rammer_model *model, const char *name, int64_t value);

/* Bind an array of exactly port.bytes bytes to an input or output. It must stay valid until another array is bound to the port or
 * the model is closed. */
rammer_status rammer_bind_input(rammer_model *model, const char *name, const void *data, size_t bytes);
rammer_status rammer_bind_output(rammer_model *model, const char *name, void *data, size_t bytes);

/* Run the model on the bound arrays; return when the outputs are complete. */
rammer_status rammer_run(rammer_model *model);

/* Free the model and its device memory. NULL is ignored. */
void rammer_close(rammer_model *model);

/* Return the message of this thread's last failure. */
const char *rammer_error(void);

#ifdef __cplusplus
}
#endif
#endif
