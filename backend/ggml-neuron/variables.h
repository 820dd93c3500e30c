// The environment variables that tell the backend what to do: docs/llama-cpp.md.

#pragma once

#include <string>

// Returns a variable's value; "" when it is not set.
std::string neuron_variable(const char * name);

// Returns whether one of the backend's variables is set, so that the user expects it to do something.
bool neuron_any_variable();

// Warns of each variable whose name begins as the project's do and is not one of them, with the name that is most like it.
void neuron_warn_of_unknown_variables();
