#include "sha256.h"

#include <algorithm>

namespace nk {

namespace {

constexpr size_t BLOCK = 64;  // bytes

constexpr uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

constexpr uint32_t rotated(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

void add_block(const uint8_t * block, uint32_t state[8]) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++) {
        w[i] = uint32_t(block[4 * i]) << 24 | uint32_t(block[4 * i + 1]) << 16 | uint32_t(block[4 * i + 2]) << 8 |
               block[4 * i + 3];
    }
    for (int i = 16; i < 64; i++) {
        const uint32_t s0 = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3;
        const uint32_t s1 = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i]              = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; i++) {
        const uint32_t s1 = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25);
        const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + K[i] + w[i];
        const uint32_t s0 = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22);
        const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
        h                 = g;
        g                 = f;
        f                 = e;
        e                 = d + t1;
        d                 = c;
        c                 = b;
        b                 = a;
        a                 = t1 + t2;
    }
    const uint32_t sum[8] = { a, b, c, d, e, f, g, h };
    for (int i = 0; i < 8; i++) {
        state[i] += sum[i];
    }
}

// Adds the end of the data: the bytes after its whole blocks, a bit, zeros, and the number of bits.
void add_end(const uint8_t * rest, size_t n_rest, uint64_t size, uint32_t state[8]) {
    uint8_t end[2 * BLOCK] = {};
    std::copy_n(rest, n_rest, end);
    end[n_rest]         = 0x80;
    const size_t length = n_rest + 1 + 8 <= BLOCK ? BLOCK : 2 * BLOCK;
    for (int i = 0; i < 8; i++) {
        end[length - 1 - i] = static_cast<uint8_t>(size * 8 >> 8 * i);
    }
    for (size_t at = 0; at < length; at += BLOCK) {
        add_block(end + at, state);
    }
}

}  // namespace

void sha256(const uint8_t * data, size_t size, char digits[SHA256_DIGITS + 1]) {
    uint32_t state[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19
    };
    const size_t whole = size / BLOCK * BLOCK;
    for (size_t at = 0; at < whole; at += BLOCK) {
        add_block(data + at, state);
    }
    add_end(data + whole, size - whole, size, state);
    for (const uint32_t word : state) {
        for (int shift = 28; shift >= 0; shift -= 4) {
            *digits++ = "0123456789abcdef"[word >> shift & 15];
        }
    }
    *digits = '\0';
}

}  // namespace nk
