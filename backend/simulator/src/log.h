// Messages on standard error, filtered by NEURON_RT_LOG_LEVEL.

#pragma once

namespace simulator {

enum class level { error, warning, info, debug };

// Prints one line, `NRT simulator <LEVEL> <where>: <message>`, if the level `at` is enabled.
__attribute__((format(printf, 3, 4))) void log(level at, const char * where, const char * format, ...);

}  // namespace simulator
