// The check that bytes are UTF-8.

#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace nk {

// Returns how many bytes from the beginning are valid UTF-8: all, or the bytes before the first character that is
// incomplete, overlong or invalid (half of a UTF-16 pair, or above U+10FFFF).
inline size_t utf8_length(std::string_view text) {
    size_t at = 0;
    while (at < text.size()) {
        const size_t left = text.size() - at;
        uint64_t     eight;
        if (left >= sizeof(eight)) {
            memcpy(&eight, text.data() + at, sizeof(eight));
            if ((eight & 0x8080808080808080) == 0) {  // ASCII, like nearly all text
                at += sizeof(eight);
                continue;
            }
        }
        const auto byte = [&](size_t i) {
            return static_cast<unsigned char>(text[at + i]);
        };
        const unsigned char first = byte(0);
        if (first < 0x80) {
            at++;
            continue;
        }
        const size_t n = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
        if (first < 0xC2 || first > 0xF4 || n > left || (first == 0xE0 && byte(1) < 0xA0) ||
            (first == 0xED && byte(1) > 0x9F) || (first == 0xF0 && byte(1) < 0x90) ||
            (first == 0xF4 && byte(1) > 0x8F)) {
            return at;
        }
        for (size_t i = 1; i < n; i++) {
            if ((byte(i) & 0xC0) != 0x80) {
                return at;
            }
        }
        at += n;
    }
    return at;
}

}  // namespace nk
