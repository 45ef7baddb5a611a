// machine.h for Python: triton_machine.py. What is wrong is a RuntimeError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "machine.h"

namespace py = pybind11;

namespace {

// A block is n_threads along x. parameters: as they lie in the constant bank.
void run(machine::Program& program, const std::string& kernel, const std::array<unsigned, 3>& grid, unsigned n_threads,
         size_t dynamic_shared, const std::string& parameters, int order) {
  program.run(kernel,
              {{grid[0], grid[1], grid[2]}, {n_threads, 1, 1}, 1, dynamic_shared, parameters.data(), parameters.size()},
              order);
}

}  // namespace

PYBIND11_MODULE(machine, module) {
  py::class_<machine::Program>(module, "Program")
      .def(py::init<const std::string&, const std::string&>())
      .def("run", &run, py::call_guard<py::gil_scoped_release>());
}
