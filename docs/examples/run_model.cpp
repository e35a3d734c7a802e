// Run a compiled file on inputs of zeros, and print the first bytes of each output: run_model MODEL.rammer
//
// cc -c core/runtime_c/rammer.c
// c++ -std=c++17 -I core/runtime_c docs/examples/run_model.cpp rammer.o -ldl -o run_model
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <vector>

#include "rammer.h"

namespace {

struct Close {
  void operator()(rammer_model *model) const { rammer_close(model); }
};
using Model = std::unique_ptr<rammer_model, Close>;

void check(rammer_status status) {
  if (status != RAMMER_OK) throw std::runtime_error(rammer_error());
}

Model open_trusted(const char *path) {
  rammer_options options{};
  options.trust = 1;
  rammer_model *model = nullptr;
  check(rammer_open(path, &options, &model));
  return Model(model);
}

void run(const char *path) {
  Model model = open_trusted(path);
  std::size_t inputs = 0, outputs = 0;
  const rammer_port *in = rammer_inputs(model.get(), &inputs), *out = rammer_outputs(model.get(), &outputs);
  std::vector<std::vector<unsigned char>> arrays;
  for (std::size_t i = 0; i < inputs; ++i) {
    arrays.emplace_back(in[i].bytes + 1);
    check(rammer_bind_input(model.get(), in[i].name, arrays.back().data(), in[i].bytes));
  }
  for (std::size_t i = 0; i < outputs; ++i) {
    arrays.emplace_back(out[i].bytes + 1);
    check(rammer_bind_output(model.get(), out[i].name, arrays.back().data(), out[i].bytes));
  }
  check(rammer_run(model.get()));
  for (std::size_t i = 0; i < outputs; ++i) {
    std::printf("output %s: %s", out[i].name, out[i].type);
    for (std::size_t k = 0; k < 8 && k < out[i].bytes; ++k) std::printf(" %02x", arrays[inputs + i][k]);
    std::printf("\n");
  }
}

}  // namespace

int main(int count, char **words) {
  if (count != 2) return std::fprintf(stderr, "usage: %s MODEL.rammer\n", words[0]), 64;
  try {
    run(words[1]);
  } catch (const std::exception &problem) {
    return std::fprintf(stderr, "%s: %s\n", words[1], problem.what()), EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
