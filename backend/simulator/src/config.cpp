#include "config.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace simulator {

static constexpr uint32_t MAX_CORES = 128;
static constexpr size_t   GIB       = size_t(1) << 30;

// HBM of a trn1 or inf2 chip, 32 GiB, for each of its two cores.
static constexpr size_t CORE_MEMORY = 16 * GIB;

// Returns the variable's text, null when it is unset or empty.
static const char * variable(const char * name) {
    const char * text = getenv(name);
    return text != nullptr && *text != '\0' ? text : nullptr;
}

// Reads digits; moves `text` behind them.
static bool read_number(const char *& text, uint64_t & out) {
    if (*text < '0' || *text > '9') {
        return false;
    }
    char * end;
    errno = 0;
    out   = strtoull(text, &end, 10);
    text  = end;
    return errno == 0;
}

static bool read_count(const char * text, uint32_t & out) {
    uint64_t number;
    if (!read_number(text, number) || *text != '\0' || number < 1 || number > MAX_CORES) {
        return false;
    }
    out = static_cast<uint32_t>(number);
    return true;
}

// "3", "0-3", "0,2,5-7": ascending, none twice.
static bool read_list(const char * text, std::vector<uint32_t> & out) {
    for (;;) {
        uint64_t first;
        if (!read_number(text, first)) {
            return false;
        }
        uint64_t last = first;
        if (*text == '-' && !read_number(++text, last)) {
            return false;
        }
        if (last < first || last >= MAX_CORES || (!out.empty() && first <= out.back())) {
            return false;
        }
        for (uint64_t core = first; core <= last; core++) {
            out.push_back(static_cast<uint32_t>(core));
        }
        if (*text == '\0') {
            return true;
        }
        if (*text++ != ',') {
            return false;
        }
    }
}

// "512M", "16G", "1048576".
static bool read_size(const char * text, size_t & out) {
    uint64_t number;
    if (!read_number(text, number)) {
        return false;
    }
    const char * const units = "KMG";
    if (*text != '\0') {
        const char * unit = strchr(units, *text);
        if (unit == nullptr) {
            return false;
        }
        const int shift = 10 * static_cast<int>(unit - units + 1);
        if (number > SIZE_MAX >> shift) {
            return false;
        }
        number <<= shift;
        text++;
    }
    // More than an address space has would fail later, less clearly.
    if (*text != '\0' || number < 1 || number > uint64_t(1) << 44) {
        return false;
    }
    out = number;
    return true;
}

static std::string bad(const char * name, const char * text, const char * expected) {
    return std::string(name) + "=" + text + ": expected " + expected;
}

bool config::read(config & out, std::string & error) {
    out = config();

    const char * const total = variable("NEURON_SIMULATOR_CORES");
    if (total != nullptr && !read_count(total, out.total)) {
        error = bad("NEURON_SIMULATOR_CORES", total, "a number from 1 to 128");
        return false;
    }
    const char * const list = variable("NEURON_RT_VISIBLE_CORES");
    const char * const num  = variable("NEURON_RT_NUM_CORES");
    if (list != nullptr) {
        if (!read_list(list, out.visible)) {
            error = bad("NEURON_RT_VISIBLE_CORES", list, "cores as in 0-3 or 0,2,3, ascending");
            return false;
        }
    } else {
        uint32_t count = out.total;
        if (num != nullptr && !read_count(num, count)) {
            error = bad("NEURON_RT_NUM_CORES", num, "a number from 1 to 128");
            return false;
        }
        for (uint32_t core = 0; core < count; core++) {
            out.visible.push_back(core);
        }
    }
    // An instance that was not described has the cores that are asked for.
    if (out.visible.back() >= out.total) {
        if (total != nullptr) {
            error = std::string(list != nullptr ? "NEURON_RT_VISIBLE_CORES=" : "NEURON_RT_NUM_CORES=") +
                    (list != nullptr ? list : num) + ": the simulated instance has " + total +
                    " cores (NEURON_SIMULATOR_CORES)";
            return false;
        }
        out.total = out.visible.back() + 1;
    }

    const size_t machine = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    out.host_memory      = std::max(machine, 4 * GIB);
    out.memory           = std::min(CORE_MEMORY, std::max(machine / 2, GIB));

    const char * const memory = variable("NEURON_SIMULATOR_MEMORY");
    if (memory != nullptr && !read_size(memory, out.memory)) {
        error = bad("NEURON_SIMULATOR_MEMORY", memory, "bytes per core, as in 16G, 512M or 65536");
        return false;
    }

    const char * const timeout = variable("NEURON_RT_EXEC_TIMEOUT");
    if (timeout != nullptr) {
        char * end;
        out.exec_timeout = strtod(timeout, &end);
        if (*end != '\0' || !std::isfinite(out.exec_timeout) || out.exec_timeout < 0) {
            error = bad("NEURON_RT_EXEC_TIMEOUT", timeout, "seconds");
            return false;
        }
    }
    return true;
}

}  // namespace simulator
