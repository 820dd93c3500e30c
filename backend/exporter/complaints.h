// llama.cpp's own messages: the reason when it refuses a file or ends the program.

#pragma once

#include "ggml.h"

#include <string>

inline constexpr int EXIT_BAD_INPUT = 2;

// The file that is read, for messages.
extern std::string model_name;

// What llama.cpp complained of; empty if it did not.
extern std::string last_complaint;

// Keeps an error that llama.cpp logs in `last_complaint`; a callback of ggml's and llama.cpp's logs.
void note_complaint(ggml_log_level level, const char * text, void * user_data);

// Prints what is wrong with the file, and ends the process.
[[noreturn]] void give_up(const std::string & message);

// The same with the reason for which llama.cpp ends the program; a callback of ggml.
void give_up_on_abort(const char * text);
