// The minimum for a test program: a check that reports its place and continues, and an exit status.

#pragma once

#include <cstdio>

inline int & n_failures() {
    static int n = 0;
    return n;
}

// Counts a failure and prints it with a printf-style explanation.
#define CHECK_MSG(condition, ...)                                                       \
    do {                                                                                \
        if (!(condition)) {                                                             \
            std::fprintf(stderr, "%s:%d: %s failed: ", __FILE__, __LINE__, #condition); \
            std::fprintf(stderr, __VA_ARGS__);                                          \
            std::fprintf(stderr, "\n");                                                 \
            n_failures()++;                                                             \
        }                                                                               \
    } while (0)

#define CHECK(condition) CHECK_MSG(condition, "%s", "")

// Returns the exit status for main.
inline int test_result() {
    if (n_failures() > 0) {
        std::fprintf(stderr, "%d checks failed\n", n_failures());
    }
    return n_failures() > 0 ? 1 : 0;
}
