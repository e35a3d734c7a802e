/* Run a compiled file on arrays in files: run_model MODEL.rammer FOLDER [LENGTH=VALUE ...] reads input number N from FOLDER/N.in and
 * writes output number N to FOLDER/N.out, as bytes in row-major order. Without FOLDER it checks the file and prints its ports.
 *
 * cc -I core/runtime_c docs/examples/run_model.c core/runtime_c/rammer.c -ldl -o run_model */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rammer.h"

static int report(const char *what) {
  fprintf(stderr, "%s: %s\n", what, rammer_error());
  return 1;
}

static int transfer(const char *folder, size_t number, const char *ending, const char *mode, void *data, size_t bytes) {
  char path[4096];
  if (snprintf(path, sizeof path, "%s/%zu.%s", folder, number, ending) >= (int)sizeof path) return 1;
  FILE *file = fopen(path, mode);
  if (!file) return perror(path), 1;
  size_t moved = *mode == 'r' ? fread(data, 1, bytes, file) : fwrite(data, 1, bytes, file);
  if (fclose(file) || moved != bytes) return fprintf(stderr, "%s: %zu of %zu bytes\n", path, moved, bytes), 1;
  return 0;
}

/* Bind new arrays to all ports. Inputs are read from their files. */
static int bind_all(rammer_model *model, const char *folder, const rammer_port *ports, size_t count, int inputs, void **arrays) {
  for (size_t i = 0; i < count; ++i) {
    arrays[i] = calloc(1, ports[i].bytes + 1);
    if (!arrays[i]) return perror("calloc"), 1;
    if (inputs && transfer(folder, i, "in", "rb", arrays[i], ports[i].bytes)) return 1;
    if (inputs ? rammer_bind_input(model, ports[i].name, arrays[i], ports[i].bytes)
               : rammer_bind_output(model, ports[i].name, arrays[i], ports[i].bytes))
      return report(ports[i].name);
  }
  return 0;
}

/* Set the lengths of a range, each given as NAME=VALUE. */
static int set_lengths(rammer_model *model, int count, char **words) {
  for (int i = 0; i < count; ++i) {
    char *value = strchr(words[i], '=');
    if (!value) return fprintf(stderr, "%s is not a length\n", words[i]), 1;
    *value = 0;
    if (rammer_set_length(model, words[i], atoll(value + 1))) return report(words[i]);
  }
  return 0;
}

int main(int count, char **words) {
  if (count < 2) return fprintf(stderr, "usage: %s MODEL.rammer [FOLDER [LENGTH=VALUE ...]]\n", words[0]), 64;
  const char *folder = count > 2 ? words[2] : NULL;
  rammer_options options = {.trust = folder != NULL, .check_only = folder == NULL};
  rammer_model *model;
  rammer_status status = rammer_open(words[1], &options, &model);
  if (status) return report(words[1]), 10 + (int)status;
  size_t inputs, outputs;
  const rammer_port *in = rammer_inputs(model, &inputs), *out = rammer_outputs(model, &outputs);
  for (size_t i = 0; i < inputs; ++i) printf("input %s: %s\n", in[i].name, in[i].type);
  for (size_t i = 0; i < outputs; ++i) printf("output %s: %s\n", out[i].name, out[i].type);
  rammer_length length;
  for (size_t i = 0; rammer_length_at(model, i, &length); ++i)
    printf("length %s: %lld to %lld in steps of %lld\n", length.name, (long long)length.low, (long long)length.high, (long long)length.step);
  void **arrays = calloc(inputs + outputs + 1, sizeof *arrays);
  int failed = !arrays;
  if (folder && arrays) {
    failed = set_lengths(model, count - 3, words + 3) || bind_all(model, folder, in, inputs, 1, arrays) || bind_all(model, folder, out, outputs, 0, arrays + inputs);
    for (int repeat = 0; repeat < 3 && !failed; ++repeat) failed = rammer_run(model) ? report("run") : 0;
    for (size_t i = 0; i < outputs && !failed; ++i) failed = transfer(folder, i, "out", "wb", arrays[inputs + i], out[i].bytes);
  }
  for (size_t i = 0; arrays && i < inputs + outputs; ++i) free(arrays[i]);
  free(arrays);
  rammer_close(model);
  return failed;
}
