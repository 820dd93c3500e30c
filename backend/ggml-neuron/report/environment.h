// The environment variables of the backend: docs/reference/environment.md.

#pragma once

#include <cstddef>
#include <string>

// Returns a variable's value, or "" when it is not set.
std::string neuron_variable(const char * name);

// Returns the value of a variable that is 0 or 1; `otherwise` when it is not set. Reports another value and treats it
// as not set.
bool neuron_switch(const char * name, bool otherwise);

// Returns the value of a variable that is a number from `least` to `most`; `otherwise` when it is not set. Reports
// another value and treats it as not set; `what` names the number ("a number of MiB").
size_t neuron_number(const char * name, const char * what, size_t least, size_t most, size_t otherwise);

// Returns whether one of the backend's variables is set, so that the user expects an effect.
bool neuron_any_variable();

// Warns of each variable that begins with GGML_NEURON_ and has no meaning, and of an
// invalid value of GGML_NEURON_LOG.
void neuron_warn_of_unknown_variables();
