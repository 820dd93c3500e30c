// Lower case for ASCII. The C library's tolower depends on the program's locale, and a key must not.

#pragma once

#include <string>
#include <string_view>

namespace nk {

constexpr char lower(char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
}

inline std::string lower(std::string_view text) {
    std::string result(text);
    for (char & c : result) {
        c = lower(c);
    }
    return result;
}

}  // namespace nk
