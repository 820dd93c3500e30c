// The environment variables that tell the backend what to do: docs/reference/environment.md.

#pragma once

#include <cstddef>
#include <string>

// Returns a variable's value; "" when it is not set.
std::string neuron_variable(const char * name);

// Returns whether a variable that is 0 or 1 is 1; `otherwise` when it is not set. Another value is reported and counts as not set.
bool neuron_switch(const char * name, bool otherwise);

// Returns a variable that is a number, `what` ("a number of MiB"), from `least` to `most`; `otherwise` when it is not set. Another value
// is reported and counts as not set.
size_t neuron_number(const char * name, const char * what, size_t least, size_t most, size_t otherwise);

// Reads a file that a variable names: a regular one of at most 1 MiB. Returns "", or why that fails. Never waits, as for a FIFO.
std::string neuron_read_small_file(const std::string & path, std::string & text);

// Returns whether one of the backend's variables is set, so that the user expects it to do something.
bool neuron_any_variable();

// Warns of each variable whose name begins as the project's do and is not one of them, with the name that is most like it; and of a
// value that GGML_NEURON_LOG does not take.
void neuron_warn_of_unknown_variables();
