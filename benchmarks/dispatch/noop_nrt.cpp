// A libnrt whose nrt_execute does nothing, so that the remaining time is the backend's own.
//
// It has only the functions that the backend requires (nrt_api.h). Tensors are plain host memory, so programs can write data
// and read it back. It loads any NEFF without reading it. The environment variable NOOP_NRT_TENSORS gives the names and sizes
// of its tensors: "input0=256,input1=256,output0=256".
//
// For tests of the backend's error handling, NOOP_NRT_FAIL is a list of "function=status": every call of the function returns
// this status. "function=status@n": only its n-th call does.
//
// With NOOP_NRT_COUNT it prints to stderr, when it is unloaded, the bytes written to its tensors and read from them.

#include "nrt_api.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

struct nrt_tensor {
    char * data;
    size_t size;
    bool   owned;
};

struct nrt_tensor_set {
    std::unordered_map<std::string, nrt_tensor_t *> tensors;
};

struct nrt_model {
    int vnc;
};

namespace {

struct failure {
    NRT_STATUS status;
    long       at;  // the call that fails; 0: all of them
    long       calls = 0;
};

// Returns the status for a call of a function.
NRT_STATUS outcome(const char * function) {
    static auto * failures = [] {
        auto *       table = new std::unordered_map<std::string, failure>;
        const char * text  = getenv("NOOP_NRT_FAIL");
        std::string  list  = text ? text : "";
        for (size_t start = 0; start < list.size();) {
            const size_t end = list.find(',', start) == std::string::npos ? list.size() : list.find(',', start);
            char         name[64];
            int          status = 0;
            long         at     = 0;
            if (sscanf(list.substr(start, end - start).c_str(), "%63[^=]=%d@%ld", name, &status, &at) >= 2) {
                table->insert({
                    name, { (NRT_STATUS) status, at, 0 }
                });
            }
            start = end + 1;
        }
        return table;
    }();
    if (failures->empty()) {
        return NRT_SUCCESS;
    }
    const auto found = failures->find(function);
    if (found == failures->end()) {
        return NRT_SUCCESS;
    }
    failure & f = found->second;
    f.calls++;
    return !f.at || f.at == f.calls ? f.status : NRT_SUCCESS;
}

// Transfers between the host and tensors.
struct transfers {
    std::atomic<size_t> bytes_in{ 0 };
    std::atomic<size_t> writes{ 0 };
    std::atomic<size_t> bytes_out{ 0 };
    std::atomic<size_t> reads{ 0 };

    ~transfers() {
        if (getenv("NOOP_NRT_COUNT")) {
            fprintf(stderr, "libnrt: %zu bytes in %zu writes, %zu bytes in %zu reads\n", bytes_in.load(), writes.load(),
                    bytes_out.load(), reads.load());
        }
    }
};

transfers counted;

}  // namespace

#define TRY(name)                                \
    do {                                         \
        const NRT_STATUS status = outcome(name); \
        if (status != NRT_SUCCESS) {             \
            return status;                       \
        }                                        \
    } while (0)

API NRT_STATUS nrt_init(nrt_framework_type_t, const char *, const char *) {
    TRY("nrt_init");
    return NRT_SUCCESS;
}

API void nrt_close(void) {}

API const char * nrt_get_status_as_str(NRT_STATUS status) {
    switch (status) {
        case NRT_SUCCESS:
            return "NRT_SUCCESS";
        case NRT_INVALID:
            return "NRT_INVALID";
        case NRT_RESOURCE:
            return "NRT_RESOURCE";
        case NRT_HW_ERROR:
            return "NRT_HW_ERROR";
        default:
            return "NRT_FAILURE";
    }
}

API NRT_STATUS nrt_get_version(nrt_version_t * version, size_t size) {
    nrt_version_t v{};
    // The tests have NEFFs of the simulator, which this library does not read.
    snprintf(v.rt_detail, sizeof(v.rt_detail), "%s", getenv("NOOP_NRT_REAL") ? "no-op" : "no-op simulator");
    memcpy(version, &v, size < sizeof(v) ? size : sizeof(v));
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_get_visible_vnc_count(uint32_t * count) {
    TRY("nrt_get_visible_vnc_count");
    const char * n = getenv("NEURON_RT_NUM_CORES");
    *count         = n ? (uint32_t) atoi(n) : 1;
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_load(const void *, size_t, int32_t start_vnc, int32_t, nrt_model_t ** model) {
    TRY("nrt_load");
    *model = new nrt_model{ start_vnc };
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_unload(nrt_model_t * model) {
    delete model;
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_execute(nrt_model_t *, const nrt_tensor_set_t *, nrt_tensor_set_t *) {
    TRY("nrt_execute");
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_get_model_tensor_info(nrt_model_t *, nrt_tensor_info_array_t ** info) {
    TRY("nrt_get_model_tensor_info");
    const char *                                text = getenv("NOOP_NRT_TENSORS");
    std::string                                 list = text ? text : "";
    std::vector<std::pair<std::string, size_t>> tensors;
    for (size_t start = 0; start < list.size();) {
        const size_t end = list.find(',', start) == std::string::npos ? list.size() : list.find(',', start);
        char         name[64];
        size_t       size;
        if (sscanf(list.substr(start, end - start).c_str(), "%63[^=]=%zu", name, &size) == 2) {
            tensors.emplace_back(name, size);
        }
        start = end + 1;
    }
    auto * array = (nrt_tensor_info_array_t *) calloc(
        1, sizeof(nrt_tensor_info_array_t) + tensors.size() * sizeof(nrt_tensor_info_t));
    array->tensor_count = tensors.size();
    for (size_t i = 0; i < tensors.size(); i++) {
        nrt_tensor_info_t & t = array->tensor_array[i];
        snprintf(t.name, sizeof(t.name), "%s", tensors[i].first.c_str());
        t.usage = tensors[i].first.rfind("output", 0) == 0 ? NRT_TENSOR_USAGE_OUTPUT : NRT_TENSOR_USAGE_INPUT;
        t.size  = tensors[i].second;
        t.dtype = NRT_DTYPE_FLOAT32;
    }
    *info = array;
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_free_model_tensor_info(nrt_tensor_info_array_t * info) {
    free(info);
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t ** set) {
    TRY("nrt_allocate_tensor_set");
    *set = new nrt_tensor_set;
    return NRT_SUCCESS;
}

API void nrt_destroy_tensor_set(nrt_tensor_set_t ** set) {
    delete *set;
    *set = nullptr;
}

API NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t * set, const char * name, nrt_tensor_t * tensor) {
    TRY("nrt_add_tensor_to_tensor_set");
    set->tensors[name] = tensor;
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t, int, size_t size, const char *, nrt_tensor_t ** tensor) {
    TRY("nrt_tensor_allocate");
    char * data = (char *) calloc(1, size);
    if (!data) {
        return NRT_RESOURCE;
    }
    *tensor = new nrt_tensor{ data, size, true };
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t * source,
                                         size_t               offset,
                                         size_t               size,
                                         const char *,
                                         nrt_tensor_t ** slice) {
    TRY("nrt_tensor_allocate_slice");
    if (offset + size > source->size) {
        return NRT_INVALID;
    }
    *slice = new nrt_tensor{ source->data + offset, size, false };
    return NRT_SUCCESS;
}

API void nrt_tensor_free(nrt_tensor_t ** tensor) {
    if ((*tensor)->owned) {
        free((*tensor)->data);
    }
    delete *tensor;
    *tensor = nullptr;
}

API NRT_STATUS nrt_tensor_read(const nrt_tensor_t * tensor, void * data, size_t offset, size_t size) {
    TRY("nrt_tensor_read");
    if (offset + size > tensor->size) {
        return NRT_INVALID;
    }
    memcpy(data, tensor->data + offset, size);
    counted.bytes_out += size;
    counted.reads++;
    return NRT_SUCCESS;
}

API NRT_STATUS nrt_tensor_write(nrt_tensor_t * tensor, const void * data, size_t offset, size_t size) {
    TRY("nrt_tensor_write");
    if (offset + size > tensor->size) {
        return NRT_INVALID;
    }
    memcpy(tensor->data + offset, data, size);
    counted.bytes_in += size;
    counted.writes++;
    return NRT_SUCCESS;
}
