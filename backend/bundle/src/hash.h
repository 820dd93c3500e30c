// The hash of a sequence of words that finds a kernel's key (docs/reference/bundle-keys.md, "Hash and table"). Hash
// maps of nodes and graphs also use it; their values never leave the program.

#pragma once

#include <cstddef>
#include <cstdint>

namespace nk {

class word_hash {
  public:
    void add(uint64_t word) {
        h = (h ^ word) * 0xFF51AFD7ED558CCD;
        h ^= h >> 32;
    }

    uint64_t value() const { return h; }

  private:
    uint64_t h = 0x9E3779B97F4A7C15;
};

inline uint64_t hash_words(const uint64_t * words, size_t n_words) {
    word_hash h;
    for (size_t i = 0; i < n_words; i++) {
        h.add(words[i]);
    }
    return h.value();
}

}  // namespace nk
