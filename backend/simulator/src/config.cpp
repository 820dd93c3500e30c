#include "config.h"

#include "../../nrt/nrt_api.h"
#include "faults.h"

#include <dlfcn.h>
#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace simulator {

static constexpr uint32_t MAX_CORES = 128;
static constexpr size_t   GIB       = size_t(1) << 30;
static constexpr size_t   MIB       = size_t(1) << 20;

#include "instances.inc"

static constexpr double MAX_LAUNCH_US = 1e7;
static constexpr size_t MAX_ALIGNMENT = 65536;

// The largest number of requests in a queue of nrta_*: libnrt reduces a larger NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS
// to this.
static constexpr uint32_t MAX_QUEUE = 63;

// Returns the variable's text, null when it is unset or empty.
static const char * variable(const char * name) {
    const char * text = getenv(name);
    return text != nullptr && *text != '\0' ? text : nullptr;
}

// Reads digits and moves `text` behind them.
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

// Reads a list such as "3", "0-3" or "0,2,5-7": ascending, without duplicates.
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

// Reads a size such as "512M", "16G" or "1048576".
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
    // A size beyond the address space would fail later, with a less clear message.
    if (*text != '\0' || number < 1 || number > uint64_t(1) << 44) {
        return false;
    }
    out = number;
    return true;
}

static bool read_duration(const char * text, double most, double & out) {
    char * end;
    out = strtod(text, &end);
    return *end == '\0' && std::isfinite(out) && out >= 0 && out <= most;
}

static std::string bad(const char * name, const char * text, const char * expected) {
    return std::string(name) + "=" + text + ": expected " + expected;
}

static bool read_fault(config & out, std::string & error) {
    const char * const fault = variable("NEURON_SIMULATOR_FAULT");
    std::string        expected;
    out.fault = fault != nullptr ? fault : "";
    if (!faults().read(out.fault, expected)) {
        error = bad("NEURON_SIMULATOR_FAULT", fault, expected.c_str());
        return false;
    }
    return true;
}

// Returns the configured number of physical cores per logical core, or "". AWS's file is in the folder above libnrt's.
static std::string read_lnc() {
    for (const char * const name : { "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE" }) {
        if (const char * const value = variable(name)) {
            return value;
        }
    }
    std::string text;
    Dl_info     own;
    if (dladdr(reinterpret_cast<const void *>(nrt_init), &own) != 0) {
        std::ifstream(std::filesystem::path(own.dli_fname).parent_path().parent_path() / "logical_nc_config") >> text;
    }
    return text;
}

// Reads the kind of machine, the release of the SDK, and whether to be strict.
static bool read_profile(config & out, std::string & error) {
    const char * const name = variable("NEURON_SIMULATOR_INSTANCE");
    if (name != nullptr) {
        std::string known;
        for (const instance & one : INSTANCES) {
            known += (known.empty() ? "" : ", ") + std::string(one.name);
            if (strcmp(one.name, name) == 0) {
                out.profile = &one;
            }
        }
        if (out.profile == nullptr) {
            error = bad("NEURON_SIMULATOR_INSTANCE", name, ("one of " + known).c_str());
            return false;
        }
        out.total = out.profile->cores;
        out.lnc   = out.profile->lnc;
    }
    // For trn1 and inf2, whose cores are not grouped, AWS does not document values other than 1.
    const std::string lnc = read_lnc();
    if (lnc == "1" || lnc == "2") {
        out.lnc = static_cast<uint32_t>(lnc[0] - '0');
        if (out.profile != nullptr && out.profile->lnc == 2 && out.lnc == 1) {
            out.total *= 2;
        }
    }
    const char * const older  = variable("NEURON_RT_ALLOW_LEGACY_NEFF");
    out.older_neffs           = older != nullptr && (strcasecmp(older, "true") == 0 || strcmp(older, "1") == 0);
    const char * const strict = variable("NEURON_SIMULATOR_STRICT");
    if (strict != nullptr) {
        if (strcmp(strict, "0") != 0 && strcmp(strict, "1") != 0) {
            error = bad("NEURON_SIMULATOR_STRICT", strict, "0 or 1");
            return false;
        }
        out.strict = *strict == '1';
    }
    const char * const release = variable("NEURON_SIMULATOR_RELEASE");
    if (release != nullptr) {
        const char * text  = release;
        uint64_t     major = 0;
        uint64_t     minor = 0;
        const bool   good  = read_number(text, major) && *text == '.' && read_number(++text, minor) && *text == '\0';
        if (!good || major != 2 || minor > 999) {
            error = bad("NEURON_SIMULATOR_RELEASE", release, "a release of the Neuron SDK, as in 2.27");
            return false;
        }
        out.release = static_cast<uint32_t>(minor);
    }
    // Since runtime 2.27, of SDK 2.25, reports are off by default: the hardware makes wrong ones. Source: AWS Neuron, release
    // notes of the runtime.
    const char * const verbosity = variable("NEURON_RT_NUMERICAL_ERRORS_VERBOSITY");
    const char * const fails     = variable("NEURON_FAIL_ON_NAN");
    out.reports_nan              = out.release < 25 || (verbosity != nullptr && strcmp(verbosity, "critical") == 0) ||
                                   (fails != nullptr && strcmp(fails, "1") == 0);
    const char * const page      = variable("NEURON_SCRATCHPAD_PAGE_SIZE");
    if (page != nullptr && (!read_size(page, out.page) || out.page > GIB / MIB * 16)) {
        error = bad("NEURON_SCRATCHPAD_PAGE_SIZE", page, "MiB");
        return false;
    }
    out.page *= MIB;
    const char * const alignment = variable("NEURON_SIMULATOR_SLICE_ALIGNMENT");
    if (alignment != nullptr && (!read_size(alignment, out.slice_alignment) || out.slice_alignment > MAX_ALIGNMENT)) {
        error = bad("NEURON_SIMULATOR_SLICE_ALIGNMENT", alignment, "bytes, at most 65536");
        return false;
    }
    const char * const root  = variable("NEURON_RT_ROOT_COMM_ID");
    out.root_comm            = root != nullptr ? root : "";
    const char * const locks = variable("NEURON_SIMULATOR_LOCKS");
    out.lock_folder          = locks != nullptr ? locks : "";
    return true;
}

// Sources: AWS Neuron's pages on NeuronCores, and "Neuron device memory" in its pages on the runtime.

size_t config::state_buffer() const {
    return (profile != nullptr ? profile->sbuf : STATE_BUFFER) * std::max(lnc, 1u);
}

size_t config::microcode() const {
    return 96 * MIB * std::max(lnc, 1u);
}

size_t config::scratchpad_page() const {
    return page > 0 ? page : (release >= 31 ? 64 : 512) * MIB;
}

bool config::read(config & out, std::string & error) {
    out = config();

    if (!read_profile(out, error) || !read_fault(out, error)) {
        return false;
    }
    const char * const total = variable("NEURON_SIMULATOR_CORES");
    if (total != nullptr && !read_count(total, out.total)) {
        error = bad("NEURON_SIMULATOR_CORES", total, "a number from 1 to 128");
        return false;
    }
    const char * const list = variable("NEURON_RT_VISIBLE_CORES");
    const char *       num  = variable("NEURON_RT_NUM_CORES");
    if (num != nullptr && strcmp(num, "0") == 0) {
        num = nullptr;  // all cores. Source: AWS Neuron, "Neuron Runtime configuration"
    }
    if (list != nullptr) {
        if (!read_list(list, out.visible)) {
            error = bad("NEURON_RT_VISIBLE_CORES", list, "cores as in 0-3 or 0,2,3, ascending");
            return false;
        }
        const bool gap = out.visible.back() - out.visible.front() >= out.visible.size();
        if (out.strict && gap) {
            error = bad("NEURON_RT_VISIBLE_CORES", list, "cores that follow one another, as in 0-3");
            return false;
        }
    } else {
        uint32_t count = out.total;
        if (num != nullptr && !read_count(num, count)) {
            error = bad("NEURON_RT_NUM_CORES", num, "a number from 0 to 128");
            return false;
        }
        for (uint32_t core = 0; core < count; core++) {
            out.visible.push_back(core);
        }
    }
    // Without a description, the instance has as many cores as the variables name.
    if (out.visible.back() >= out.total) {
        if (total != nullptr || out.profile != nullptr) {
            error = std::string(list != nullptr ? "NEURON_RT_VISIBLE_CORES=" : "NEURON_RT_NUM_CORES=") +
                    (list != nullptr ? list : num) + ": the simulated instance has " + std::to_string(out.total) +
                    " cores (" + (total != nullptr ? "NEURON_SIMULATOR_CORES" : "NEURON_SIMULATOR_INSTANCE") + ")";
            return false;
        }
        out.total = out.visible.back() + 1;
    }
    if (list == nullptr && num != nullptr) {
        out.any_of = out.total;
    }

    const size_t machine = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    out.host_memory      = std::max(machine, 4 * GIB);
    out.memory           = std::min(CORE_MEMORY, std::max(machine / 2, GIB));
    if (out.profile != nullptr) {
        // Ungrouped cores share the memory of a group.
        out.memory = out.profile->memory * std::min(out.lnc, out.profile->lnc) / out.profile->lnc;
    }

    const char * const memory = variable("NEURON_SIMULATOR_MEMORY");
    if (memory != nullptr && !read_size(memory, out.memory)) {
        error = bad("NEURON_SIMULATOR_MEMORY", memory, "bytes per core, as in 16G, 512M or 65536");
        return false;
    }

    const char * const timeout = variable("NEURON_RT_EXEC_TIMEOUT");
    if (timeout != nullptr && !read_duration(timeout, HUGE_VAL, out.exec_timeout)) {
        error = bad("NEURON_RT_EXEC_TIMEOUT", timeout, "seconds");
        return false;
    }
    const char * const loading = variable("NEURON_SIMULATOR_LOAD_TIMEOUT");
    if (loading != nullptr && !read_duration(loading, HUGE_VAL, out.load_timeout)) {
        error = bad("NEURON_SIMULATOR_LOAD_TIMEOUT", loading, "seconds");
        return false;
    }
    const char * const queue = variable("NEURON_SIMULATOR_QUEUE");
    if (queue != nullptr && (!read_count(queue, out.queue) || out.queue > MAX_QUEUE)) {
        error = bad("NEURON_SIMULATOR_QUEUE", queue, "a number of requests from 1 to 63");
        return false;
    }
    const char * const in_flight = variable("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS");
    if (in_flight != nullptr && strcmp(in_flight, "0") != 0 && !read_count(in_flight, out.in_flight)) {
        error = bad("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", in_flight, "a number of requests from 0 to 128");
        return false;
    }
    const char * const rate = variable("NEURON_SIMULATOR_GB_PER_S");
    if (rate != nullptr && (!read_duration(rate, HUGE_VAL, out.gb_per_s) || out.gb_per_s == 0)) {
        error = bad("NEURON_SIMULATOR_GB_PER_S", rate, "GB a second, above 0");
        return false;
    }
    const char * const launch = variable("NEURON_SIMULATOR_LAUNCH_US");
    out.priced                = launch != nullptr && strcmp(launch, "target") == 0;
    if (launch != nullptr && !out.priced && !read_duration(launch, MAX_LAUNCH_US, out.launch_us)) {
        error = bad("NEURON_SIMULATOR_LAUNCH_US", launch, "microseconds, at most 10000000, or target");
        return false;
    }
    return true;
}

}  // namespace simulator
