// SHA-256 (FIPS 180-4), to check a NEFF's bytes against the digest in its bundle's index.

#pragma once

#include <cstddef>
#include <cstdint>

namespace nk {

constexpr size_t SHA256_DIGITS = 64;

// Writes the digest as lower-case hexadecimal digits, and a NUL.
void sha256(const uint8_t * data, size_t size, char digits[SHA256_DIGITS + 1]);

}  // namespace nk
