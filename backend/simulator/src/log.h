// Messages to standard error, as many as NEURON_RT_LOG_LEVEL asks for.

#pragma once

namespace simulator {

enum class level { error, warning, info, debug };

// Prints one line, `NRT simulator <LEVEL> <where>: <message>`, if `at` is asked for.
__attribute__((format(printf, 3, 4))) void log(level at, const char * where, const char * format, ...);

}  // namespace simulator
