// Writes one line of JSON.

#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

class json_line {
  public:
    void begin_object(const char * key = nullptr) { open(key, '{'); }

    void end_object() { close('}'); }

    void begin_array(const char * key) { open(key, '['); }

    void end_array() { close(']'); }

    void text(const char * key, const char * value) {
        start(key);
        add_string(value);
    }

    void integer(const char * key, int64_t value) {
        start(key);
        line += std::to_string(value);
    }

    void boolean(const char * key, bool value) {
        start(key);
        line += value ? "true" : "false";
    }

    // Adds a number to an array.
    void number(int64_t value) {
        start(nullptr);
        line += std::to_string(value);
    }

    // Adds the content of another line, which begins with a key.
    void append(const json_line & other) {
        start(nullptr);
        line += other.line;
    }

    // Returns the text written so far.
    const std::string & written() const { return line; }

    void print(FILE * file) {
        line += '\n';
        fwrite(line.data(), 1, line.size(), file);
    }

  private:
    void start(const char * key) {
        if (!line.empty() && line.back() != '{' && line.back() != '[' && line.back() != ':') {
            line += ',';
        }
        if (key) {
            add_string(key);
            line += ':';
        }
    }

    void open(const char * key, char bracket) {
        start(key);
        line += bracket;
    }

    void close(char bracket) { line += bracket; }

    // Names come from the file and may hold any bytes: each byte that is not ASCII is written as U+FFFD.
    void add_string(const char * value) {
        line += '"';
        for (const char * p = value; *p; p++) {
            const unsigned char c = (unsigned char) *p;
            if (c == '"' || c == '\\') {
                line += '\\';
                line += (char) c;
            } else if (c < 0x20 || c == 0x7f) {
                char escaped[8];
                snprintf(escaped, sizeof(escaped), "\\u%04x", c);
                line += escaped;
            } else if (c >= 0x80) {
                line += "\\ufffd";
            } else {
                line += (char) c;
            }
        }
        line += '"';
    }

    std::string line;
};
