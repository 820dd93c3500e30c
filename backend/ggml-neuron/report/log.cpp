#include "report/log.h"

#include "../../bundle/src/ascii.h"

#include <algorithm>
#include <cstdarg>
#include <map>
#include <mutex>
#include <set>
#include <string>

// Returns a message with "\n" at the end of each of its lines, and "?" for other control characters: names in a message
// may come from files of others.
static std::string formatted(const char * format, va_list arguments) {
    std::string marked = format;
    std::replace(marked.begin(), marked.end(), '\n', NEURON_NEXT_LINE[0]);
    va_list again;
    va_copy(again, arguments);
    const int   size = vsnprintf(nullptr, 0, marked.c_str(), arguments);
    std::string text(size > 0 ? (size_t) size : 0, '\0');
    vsnprintf(&text[0], text.size() + 1, marked.c_str(), again);
    va_end(again);
    std::replace(text.begin(), text.end(), '\n', ' ');
    for (size_t at = 0; at < text.size(); at++) {
        if (const size_t size = nk::control_size(text, at); size && text[at] != NEURON_NEXT_LINE[0]) {
            text.replace(at, size, "?");
        }
    }
    text.erase(text.find_last_not_of(std::string(" ") + NEURON_NEXT_LINE) + 1);
    std::replace(text.begin(), text.end(), NEURON_NEXT_LINE[0], '\n');
    return text + "\n";
}

static void print(const std::string & text) {
    std::string lines = "ggml-neuron: ";
    for (size_t i = 0; i < text.size(); i++) {
        lines += text[i];
        if (text[i] == '\n' && i + 1 < text.size()) {
            lines += "ggml-neuron:     ";
        }
    }
    fputs(lines.c_str(), stderr);
    fflush(stderr);
}

// Returns the text to print for a line: the line, a note that others are left out, or "".
static std::string admitted(const std::string & format, const std::string & line) {
    // Never destroyed: destructors of other static objects also print messages.
    static auto *                     mutex = new std::mutex;
    static auto *                     said  = new std::map<std::string, std::set<std::string>>;  // lines, by format
    const std::lock_guard<std::mutex> lock(*mutex);
    std::set<std::string> &           lines = (*said)[format];
    if (lines.size() > (size_t) NEURON_MOST_LINES || !lines.insert(line).second) {
        return "";
    }
    return lines.size() <= (size_t) NEURON_MOST_LINES
               ? line
               : "more lines like the last one are left out; GGML_NEURON_LOG=2 prints them all\n";
}

void neuron_say(const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string text = formatted(format, arguments);
    va_end(arguments);
    text = neuron_log_repeats() ? text : admitted(format, text);
    if (!text.empty()) {
        print(text);
    }
}

void neuron_say_again(const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const std::string text = formatted(format, arguments);
    va_end(arguments);
    print(text);
}
