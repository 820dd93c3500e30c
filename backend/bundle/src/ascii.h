// Lower case for ASCII, and control characters. The C library's tolower depends on the program's locale, and a key must
// not.

#pragma once

#include <cstddef>
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

// Returns the bytes of the control character at a place of UTF-8 text (Unicode's category Cc), or 0 when there is another
// one. A terminal obeys them.
constexpr size_t control_size(std::string_view text, size_t at) {
    const auto first = static_cast<unsigned char>(text[at]);
    const auto next  = static_cast<unsigned char>(at + 1 < text.size() ? text[at + 1] : 0);
    return first < 0x20 || first == 0x7F ? 1 : first == 0xC2 && next >= 0x80 && next < 0xA0 ? 2 : 0;
}

constexpr bool has_control(std::string_view text) {
    for (size_t at = 0; at < text.size(); at++) {
        if (control_size(text, at)) {
            return true;
        }
    }
    return false;
}

}  // namespace nk
