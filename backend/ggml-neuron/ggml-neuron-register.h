// Registers the backend in programs that do not load backends at run time. ggml-neuron-tree.cmake includes it ahead of
// ggml-backend-reg.cpp.

#include "ggml-neuron.h"

static const bool ggml_neuron_registered = [] {
    ggml_backend_register(ggml_backend_neuron_reg());
    return true;
}();
