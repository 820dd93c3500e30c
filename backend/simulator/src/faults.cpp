#include "faults.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <sstream>

namespace simulator {

static const char * const FAULTS[] = { "init",   "load",   "execute", "results",   "late", "aliases",
                                       "slices", "copies", "memory",  "deferred",  "kill", "lost",
                                       "names",  "order",  "busy",    "unknown",   "full", "slow",
                                       "drops",  "writes", "process", "bloat",     "rank", "straggler",
                                       "absent", "wedged", "early",   "subgraphs", "rings" };

// The helper injects these into each program that has the form: kernelgen.simulator.miscompiles.
static const char * const MISTAKES[] = { "division", "graph", "race", "rounding", "row", "split" };

// Reads a whole number of at least 1.
static bool read_count(const std::string & text, uint64_t & out) {
    if (text.empty() || !std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; })) {
        return false;
    }
    errno = 0;
    out   = strtoull(text.c_str(), nullptr, 10);
    return errno == 0 && out > 0;
}

bool faults::read(const std::string & text, std::string & expected) {
    all_.clear();
    expected = "some of";
    for (const char * name : FAULTS) {
        expected += std::string(name == FAULTS[0] ? " " : ", ") + name;
    }
    for (const char * name : MISTAKES) {
        expected += std::string(", ") + name;
    }
    expected += ", each but the last six as it is or with a count, as in memory@3 (the third time) or memory/3 (every "
                "third time)";
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');) {
        auto         one = std::make_unique<fault>();
        const size_t end = part.find_first_of("@/");
        one->name        = part.substr(0, end);
        if (end != std::string::npos && !read_count(part.substr(end + 1), part[end] == '@' ? one->at : one->every)) {
            return false;
        }
        if (std::find(std::begin(MISTAKES), std::end(MISTAKES), part) != std::end(MISTAKES)) {
            continue;
        }
        if (std::find(std::begin(FAULTS), std::end(FAULTS), one->name) == std::end(FAULTS)) {
            return false;
        }
        all_.push_back(std::move(one));
    }
    return true;
}

bool faults::strikes(const char * name) {
    bool now = false;
    for (const auto & one : all_) {
        if (one->name == name) {
            const uint64_t n = ++one->count;
            now              = now || (one->at != 0 ? n == one->at : n % one->every == 0);
        }
    }
    return now;
}

}  // namespace simulator
