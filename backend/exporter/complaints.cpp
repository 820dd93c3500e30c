#include "complaints.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

std::string model_name;
std::string last_complaint;

static std::string one_line(const char * text) {
    std::string line = text;
    while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) {
        line.pop_back();
    }
    line = line.substr(0, 500);
    // the text includes names from the file, which may contain control characters
    std::replace_if(line.begin(), line.end(), [](char c) { return (unsigned char) c < 0x20 || c == 0x7f; }, ' ');
    return line;
}

// Removes the function name at the start of most of llama.cpp's messages.
static std::string without_function(const std::string & line) {
    const size_t end = line.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_");
    return end != std::string::npos && line.compare(end, 2, ": ") == 0 ? line.substr(end + 2) : line;
}

void note_complaint(ggml_log_level level, const char * text, void * /*user_data*/) {
    if (level == GGML_LOG_LEVEL_ERROR && last_complaint.size() < 2000) {
        const std::string line = without_function(one_line(text));
        // The first line has the cause; later lines have consequences. llama.cpp may read a header more than once.
        if (!line.empty() && last_complaint.find(line) == std::string::npos) {
            last_complaint += (last_complaint.empty() ? "" : "; ") + line;
        }
    }
}

void give_up(const std::string & message) {
    // the message begins with the file's name, because a model may have several files
    const bool named = message.compare(0, model_name.size(), model_name) == 0;
    fprintf(stderr, "error: %s%s%s\n", named ? "" : model_name.c_str(), named ? "" : ": ", message.c_str());
    fflush(stderr);
    _exit(EXIT_BAD_INPUT);
}

void give_up_on_abort(const char * text) {
    give_up("llama.cpp stops: " + one_line(text) + (last_complaint.empty() ? "" : " (" + last_complaint + ")"));
}
