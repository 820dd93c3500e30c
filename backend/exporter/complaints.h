// llama.cpp's own messages: the reason when it refuses a file or ends the program.

#pragma once

#include "ggml.h"

#include <string>

inline constexpr int EXIT_BAD_INPUT = 2;

// The name of the current file, for messages.
extern std::string model_name;

// The last error that llama.cpp logged; empty if there is none.
extern std::string last_complaint;

// Stores an error in `last_complaint`. A log callback for ggml and llama.cpp.
void note_complaint(ggml_log_level level, const char * text, void * user_data);

// Prints an error about the current file, and ends the process.
[[noreturn]] void give_up(const std::string & message);

// Does the same when ggml aborts. An abort callback for ggml.
void give_up_on_abort(const char * text);
