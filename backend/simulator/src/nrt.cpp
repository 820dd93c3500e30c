// libnrt's functions for the process: nrt_init, nrt_close, and the description of the machine. models.cpp, tensors.cpp,
// execution.cpp and queues.cpp have the other functions. libnrt.map exports these functions and nothing else.

#include "../../nrt/nrt_api.h"
#include "arena.h"
#include "config.h"
#include "faults.h"
#include "locks.h"
#include "log.h"
#include "programs.h"
#include "runtime.h"
#include "units.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

using namespace simulator;

NRT_STATUS nrt_init(nrt_framework_type_t framework, const char * fw_version, const char * fal_version) {
    const char * const where = "nrt_init";
    (void) fw_version;
    (void) fal_version;
    try {
        runtime &                         rt = process();
        const std::lock_guard<std::mutex> lock(rt.mutex);
        if (rt.state == phase::open) {
            return invalid(where, "called twice");
        }
        if (rt.state == phase::closed) {
            return closed_or_not_open(rt, where);
        }
        if (framework == NRT_FRAMEWORK_TYPE_INVALID) {
            return invalid(where, "framework type 0");
        }
        std::string error;
        if (!simulator::config::read(rt.config, error)) {
            return invalid(where, error.c_str());
        }
        rt.faults.read(rt.config.fault, error);  // config::read has checked the text
        if (rt.faults.strikes("init")) {
            log(level::error, where, "NEURON_SIMULATOR_FAULT=init");
            return NRT_FAILURE;
        }
        if (!rt.config.lock_folder.empty() && !simulator::lock_cores(rt.config.lock_folder, rt.config.any_of,
                                                                     rt.config.visible, rt.locks, rt.second, error)) {
            log(level::error, where, "%s", error.c_str());
            return NRT_RESOURCE;
        }
        std::vector<std::shared_ptr<simulator::arena>> arenas;
        for (uint32_t i = 0; i <= rt.cores(); i++) {
            const bool        host = i == rt.cores();
            const std::string name = host ? "neuron-host" : "neuron-core-" + std::to_string(i);
            arenas.push_back(
                simulator::arena::create(i, name.c_str(), host ? rt.config.host_memory : rt.config.memory, error));
            if (arenas.back() == nullptr) {
                log(level::error, where, "%s", error.c_str());
                return NRT_RESOURCE;
            }
        }
        rt.arenas = std::move(arenas);
        rt.programs.clear();
        for (uint32_t i = 0; i < rt.cores(); i++) {
            rt.programs.push_back(std::make_shared<simulator::programs>(rt.arenas[i], rt.config.microcode(),
                                                                        rt.config.scratchpad_page()));
        }
        rt.core_states = std::vector<simulator::core_state>(rt.cores());
        rt.units       = std::make_unique<simulator::units>(rt.cores(), rt.config.queue);
        rt.state       = phase::open;
        if (rt.config.in_flight > 0 && !rt.config.returns_early()) {
            log(level::warning, where, "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS has no meaning since release 2.32");
        }
        log(level::info, where, "%u simulated cores of %zu bytes", rt.cores(), rt.config.memory);
        return NRT_SUCCESS;
    } catch (const std::exception & error) {
        log(level::error, where, "%s", error.what());
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
}

void nrt_close(void) {
    runtime &                         rt = process();
    const std::lock_guard<std::mutex> lock(rt.mutex);
    if (rt.forked && rt.state == phase::fresh) {
        log(level::error, "nrt_close", "called in a child of the process that called nrt_init, whose cores these are");
    }
    if (rt.state != phase::open) {
        return;  // there is nothing to close, and no way to report it
    }
    rt.state = phase::closed;
    rt.ranks.close();
    rt.units->stop();
    if (const size_t left = rt.units->registered()) {
        log(level::warning, "nrt_close", "%zu requests have eventfds that were not unregistered (-1 in place of one)",
            left);
    }
    rt.models.clear();
    rt.sets.clear();
    rt.tensors.clear();
    rt.locks.clear();
    const std::lock_guard<std::mutex> helper_lock(rt.helper_mutex);
    rt.helper = nullptr;
}

const char * nrt_get_status_as_str(NRT_STATUS status) {
#define X(name) \
    case name:  \
        return #name;
    switch (status) {
        X(NRT_SUCCESS)
        X(NRT_FAILURE)
        X(NRT_INVALID)
        X(NRT_INVALID_HANDLE)
        X(NRT_RESOURCE)
        X(NRT_TIMEOUT)
        X(NRT_HW_ERROR)
        X(NRT_QUEUE_FULL)
        X(NRT_LOAD_NOT_ENOUGH_NC)
        X(NRT_UNSUPPORTED_NEFF_VERSION)
        X(NRT_FAIL_HOST_MEM_ALLOC)
        X(NRT_UNINITIALIZED)
        X(NRT_CLOSED)
        X(NRT_QUEUE_EMPTY)
        X(NRT_EXEC_UNIT_UNRECOVERABLE)
        X(NRT_EXEC_BAD_INPUT)
        X(NRT_EXEC_COMPLETED_WITH_NUM_ERR)
        X(NRT_EXEC_COMPLETED_WITH_ERR)
        X(NRT_EXEC_NC_BUSY)
        X(NRT_EXEC_OOB)
        X(NRT_EXEC_HW_ERR_COLLECTIVES)
    }
#undef X
    return "unknown status";
}

NRT_STATUS nrt_get_version(nrt_version_t * version, size_t size) {
    if (version == nullptr || size == 0) {
        return invalid("nrt_get_version", "no room for the version");
    }
    nrt_version_t own = {};
    own.rt_major      = 2;
    // SDK 2.29 has libnrt 2.31, and so on.
    simulator::config config;
    std::string       error;
    own.rt_minor = (simulator::config::read(config, error) ? config : simulator::config()).release + 2;
    strncpy(own.rt_detail, "neuron-kernelgen simulator", sizeof(own.rt_detail) - 1);
    memset(version, 0, size);
    memcpy(version, &own, std::min(size, sizeof(own)));
    return NRT_SUCCESS;
}

NRT_STATUS nrt_get_total_vnc_count(uint32_t * count) {
    const char * const where = "nrt_get_total_vnc_count";
    if (count == nullptr) {
        return invalid(where, "null pointer");
    }
    return with_config(where, [&](const simulator::config & config) { *count = config.total; });
}

NRT_STATUS nrt_get_visible_vnc_count(uint32_t * count) {
    return with_runtime("nrt_get_visible_vnc_count", [&](runtime & rt) {
        if (count == nullptr) {
            return invalid("nrt_get_visible_vnc_count", "null pointer");
        }
        *count = rt.cores();
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t * stats, size_t size_in, size_t * size_out) {
    const char * const where = "nrt_get_vnc_memory_stats";
    return with_runtime(where, [&](runtime & rt) {
        if (stats == nullptr || vnc >= rt.cores()) {
            return invalid(where, stats == nullptr ? "null pointer" : "no such core");
        }
        // AWS does not document what logical cores report that share the memory of a group: all of it, the stricter case.
        const uint32_t         sharing = rt.config.sharing();
        nrt_vnc_memory_stats_t own     = { 0, rt.arenas[vnc]->size() * sharing };
        for (uint32_t i = 0; i < rt.cores(); i++) {
            const bool same = rt.config.visible[i] / sharing == rt.config.visible[vnc] / sharing;
            own.bytes_used += same ? rt.arenas[i]->used() : 0;
        }
        const size_t size = std::min(size_in, sizeof(own));
        memcpy(stats, &own, size);
        if (size_out != nullptr) {
            *size_out = size;
        }
        return NRT_SUCCESS;
    });
}

NRT_STATUS nec_get_virtual_core_size(uint32_t * size) {
    const char * const where = "nec_get_virtual_core_size";
    if (size == nullptr) {
        return invalid(where, "null pointer");
    }
    return with_config(where, [&](const simulator::config & config) { *size = config.lnc; });
}

// Returns the nanoseconds that the executions on a core have taken so far on a device. The simulator alone has this
// function.
extern "C" NRT_STATUS nrt_simulator_clock(uint32_t vnc, uint64_t * ns) {
    const char * const where = "nrt_simulator_clock";
    return with_runtime(where, [&](runtime & rt) {
        if (ns == nullptr || vnc >= rt.cores()) {
            return invalid(where, ns == nullptr ? "null pointer" : "no such core");
        }
        *ns = rt.core_states[vnc].clock_ns;
        return NRT_SUCCESS;
    });
}

// AWS does not document whether a client may call this before nrt_init. The driver has the information, so the
// simulator allows it.
NRT_STATUS nrt_get_instance_info(nrt_instance_info_t * info, size_t size) {
    const char * const where = "nrt_get_instance_info";
    if (info == nullptr || size == 0) {
        return invalid(where, "no room for the information");
    }
    return with_config(where, [&](const simulator::config & config) {
        const simulator::instance * profile = config.profile;
        nrt_instance_info_t         own     = {};
        own.family                          = profile != nullptr ? profile->family : NRT_INSTANCE_UNKNOWN;
        own.size                            = profile != nullptr ? profile->size : NRT_INSTANCE_SIZE_UNKNOWN;
        strncpy(own.arch_name, "simulator", sizeof(own.arch_name) - 1);
        memset(info, 0, size);
        memcpy(info, &own, std::min(size, sizeof(own)));
    });
}
