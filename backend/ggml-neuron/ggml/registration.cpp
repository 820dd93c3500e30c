#include "device/core.h"
#include "device/launch_queue.h"
#include "fallback/host_copies.h"
#include "ggml-backend-impl.h"
#include "ggml-neuron.h"
#include "ggml/backend.h"
#include "ggml/buffers.h"
#include "ggml/comm.h"
#include "ggml/device_context.h"
#include "ggml/events.h"
#include "ggml/host_buffer.h"
#include "ggml/supports.h"
#include "nrt.h"
#include "plan/fusion.h"
#include "plan/plan.h"
#include "report/environment.h"
#include "report/log.h"
#include "report/metrics.h"
#include "report/record_graphs.h"
#include "select/costs.h"
#include "select/kernel_store.h"
#include "targets.h"
#include "weights/layouts.h"
#include "weights/repacked.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

ggml_backend_t ggml_backend_neuron_init(size_t core) {
    ggml_backend_reg_t reg = ggml_backend_neuron_reg();
    if (core >= ggml_backend_reg_dev_count(reg)) {
        return NULL;
    }
    return ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, core), NULL);
}

//
// device
//

static const char * ggml_backend_neuron_device_get_name(ggml_backend_dev_t dev) {
    return ((ggml_backend_neuron_device_context *) dev->context)->name.c_str();
}

static const char * ggml_backend_neuron_device_get_description(ggml_backend_dev_t dev) {
    return ((ggml_backend_neuron_device_context *) dev->context)->description.c_str();
}

static void ggml_backend_neuron_device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    neuron_core & core = *((ggml_backend_neuron_device_context *) dev->context)->core;
    core.memory_stats(ggml_backend_neuron_shared().kernels.programs(), free, total);
    // llama.cpp distributes layers by the free memory of its devices, and ends the program when all have 0. With this
    // minimum it requests a buffer, and the failing allocation reports the reason.
    if (*total) {
        *free = std::max(*free, (size_t) 1 << 20);
    }
}

static enum ggml_backend_dev_type ggml_backend_neuron_device_get_type(ggml_backend_dev_t dev) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;

    GGML_UNUSED(dev);
}

static void ggml_backend_neuron_device_get_props(ggml_backend_dev_t dev, struct ggml_backend_dev_props * props) {
    props->name        = ggml_backend_neuron_device_get_name(dev);
    props->description = ggml_backend_neuron_device_get_description(dev);
    props->type        = ggml_backend_neuron_device_get_type(dev);
    // llama.cpp uses only the first of devices with the same id, unless -dev or -sm tensor chooses others
    props->device_id   = ggml_backend_neuron_shared().nrt->has_selected_cores ? NULL : "NeuronCore";
    ggml_backend_neuron_device_get_memory(dev, &props->memory_free, &props->memory_total);
    const bool in_host = ggml_backend_neuron_shared().buffers == neuron_buffers::HOST;
    const bool async   = ggml_backend_neuron_is_async((ggml_backend_neuron_device_context *) dev->context);

    props->caps.async                = async;
    props->caps.host_buffer          = !in_host;
    props->caps.buffer_from_host_ptr = in_host;
    props->caps.events               = async;
    props->caps.mmap_support         = true;
}

static ggml_backend_buffer_type_t ggml_backend_neuron_device_get_buffer_type(ggml_backend_dev_t dev) {
    auto * device = (ggml_backend_neuron_device_context *) dev->context;
    if (ggml_backend_neuron_shared().buffers == neuron_buffers::HOST) {
        return &device->host_buffer_type;
    }
    return &device->buffer_types[0].buft;
}

// If tensors are in host memory anyway, the host buffer type is the CPU's.
static ggml_backend_buffer_type_t ggml_backend_neuron_device_get_host_buffer_type(ggml_backend_dev_t dev) {
    return ggml_backend_neuron_shared().buffers == neuron_buffers::HOST ? NULL : neuron_host_buffer_type(dev);
}

static ggml_backend_buffer_t ggml_backend_neuron_device_buffer_from_host_ptr(ggml_backend_dev_t dev,
                                                                             void *             ptr,
                                                                             size_t             size,
                                                                             size_t             max_tensor_size) {
    if (ggml_backend_neuron_shared().buffers == neuron_buffers::HOST) {
        return neuron_kept_buffer_from_ptr(ggml_backend_neuron_device_get_buffer_type(dev), ptr, size);
    }
    return ggml_backend_cpu_buffer_from_ptr(ptr, size);

    GGML_UNUSED(max_tensor_size);
}

static bool ggml_backend_neuron_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    const bool in_host = ggml_backend_neuron_shared().buffers == neuron_buffers::HOST;
    if (in_host && ggml_backend_buft_is_host(buft)) {
        return true;
    }
    // weights in layouts are on the device even if all other tensors are in host memory
    return ggml_backend_buft_is_neuron(buft) && buft->device == dev && (!in_host || neuron_layout_of_buft(buft));
}

static constexpr struct ggml_backend_device_i ggml_backend_neuron_device_i = [] {
    struct ggml_backend_device_i i = {};
    i.get_name                     = ggml_backend_neuron_device_get_name;
    i.get_description              = ggml_backend_neuron_device_get_description;
    i.get_memory                   = ggml_backend_neuron_device_get_memory;
    i.get_type                     = ggml_backend_neuron_device_get_type;
    i.get_props                    = ggml_backend_neuron_device_get_props;
    i.init_backend                 = ggml_backend_neuron_device_init_backend;
    i.get_buffer_type              = ggml_backend_neuron_device_get_buffer_type;
    i.get_host_buffer_type         = ggml_backend_neuron_device_get_host_buffer_type;
    i.buffer_from_host_ptr         = ggml_backend_neuron_device_buffer_from_host_ptr;
    i.supports_op                  = ggml_backend_neuron_device_supports_op;
    i.supports_buft                = ggml_backend_neuron_device_supports_buft;
    i.event_new                    = ggml_backend_neuron_device_event_new;
    i.event_free                   = ggml_backend_neuron_device_event_free;
    i.event_synchronize            = ggml_backend_neuron_device_event_synchronize;
    return i;
}();

//
// registration
//

static std::vector<const neuron_kernels_table *> & ggml_backend_neuron_embedded() {
    static std::vector<const neuron_kernels_table *> tables;
    return tables;
}

void ggml_backend_neuron_register_bundle(const struct neuron_kernels_table * table) {
    ggml_backend_neuron_embedded().push_back(table);
}

#ifdef GGML_NEURON_EMBEDDED
void ggml_backend_neuron_register_embedded();  // generated: ggml-neuron.cmake
#endif

// Chooses where tensors are: by GGML_NEURON_BUFFERS, else in device memory if the kernels cover a whole transformer,
// else in host memory.
static neuron_buffers ggml_backend_neuron_choose_buffers(const neuron_kernel_store & kernels) {
    const char * chosen = getenv("GGML_NEURON_BUFFERS");
    if (chosen && *chosen) {
        if (strcmp(chosen, "device") == 0) {
            return neuron_buffers::DEVICE;
        }
        if (strcmp(chosen, "host") == 0) {
            return neuron_buffers::HOST;
        }
        NEURON_WARN("GGML_NEURON_BUFFERS is 'device' or 'host', not '%s'\n", chosen);
    }
    return kernels.covers_transformer() ? neuron_buffers::DEVICE : neuron_buffers::HOST;
}

static const char * ggml_backend_neuron_reg_get_name(ggml_backend_reg_t reg) {
    return "NEURON";

    GGML_UNUSED(reg);
}

static size_t ggml_backend_neuron_reg_get_device_count(ggml_backend_reg_t reg) {
    return ggml_backend_neuron_shared().devices.size();

    GGML_UNUSED(reg);
}

static ggml_backend_dev_t ggml_backend_neuron_reg_get_device(ggml_backend_reg_t reg, size_t index) {
    auto & devices = ggml_backend_neuron_shared().devices;
    GGML_ASSERT(index < devices.size());
    return &devices[index];

    GGML_UNUSED(reg);
}

// Functions that llama.cpp's test-fusion looks up by name. Each device counts its launches per graph kernel.
using ggml_backend_fusion_t = void *;

static ggml_backend_fusion_t ggml_backend_neuron_fusion_get(ggml_backend_dev_t dev) {
    return &((ggml_backend_neuron_device_context *) dev->context)->fusion;
}

static void ggml_backend_neuron_fusion_stats_init(ggml_backend_fusion_t fusion) {
    ((neuron_fusion *) fusion)->reset();
}

static void ggml_backend_neuron_fusion_stats_reset(ggml_backend_fusion_t fusion) {
    ((neuron_fusion *) fusion)->reset();
}

static int ggml_backend_neuron_fusion_stats_get(ggml_backend_fusion_t fusion,
                                                const char **         labels,
                                                uint64_t *            counts,
                                                int                   n) {
    return ((neuron_fusion *) fusion)->get(labels, counts, n);
}

static void ggml_backend_neuron_fusion_set_enabled(ggml_backend_fusion_t fusion, bool enabled) {
    ((neuron_fusion *) fusion)->set_enabled(enabled);
}

// A function that llama.cpp looks up by name: the buffer types to try for a weight that the device's own type refuses.
static ggml_backend_buffer_type_t * ggml_backend_neuron_get_extra_bufts(ggml_backend_dev_t dev) {
    return ((ggml_backend_neuron_device_context *) dev->context)->extra_bufts.data();
}

static void * ggml_backend_neuron_reg_get_proc_address(ggml_backend_reg_t reg, const char * name) {
    const struct {
        const char * name;
        void *       function;
    } functions[] = {
        { "ggml_backend_comm_init",              (void *) ggml_backend_neuron_comm_init             },
        { "ggml_backend_comm_free",              (void *) ggml_backend_neuron_comm_free             },
        { "ggml_backend_comm_allreduce_tensor",  (void *) ggml_backend_neuron_comm_allreduce_tensor },
        { "ggml_backend_dev_get_extra_bufts",    (void *) ggml_backend_neuron_get_extra_bufts       },
        { "ggml_backend_neuron_register_bundle", (void *) ggml_backend_neuron_register_bundle       },
        { "ggml_backend_fusion_get",             (void *) ggml_backend_neuron_fusion_get            },
        { "ggml_backend_fusion_stats_init",      (void *) ggml_backend_neuron_fusion_stats_init     },
        { "ggml_backend_fusion_stats_reset",     (void *) ggml_backend_neuron_fusion_stats_reset    },
        { "ggml_backend_fusion_stats_get",       (void *) ggml_backend_neuron_fusion_stats_get      },
        { "ggml_backend_fusion_set_enabled",     (void *) ggml_backend_neuron_fusion_set_enabled    },
    };

    for (const auto & entry : functions) {
        if (strcmp(name, entry.name) == 0) {
            return entry.function;
        }
    }
    // llama.cpp looks this up while it loads a model with -sm row, and fails without it. Programs may silence its
    // message.
    if (strcmp(name, "ggml_backend_split_buffer_type") == 0) {
        NEURON_ERROR("NeuronCores do not support -sm row\n"
                     "use -sm tensor, which splits weights by heads and the like, or -sm layer, which gives each core "
                     "whole layers\n");
    }
    return NULL;

    GGML_UNUSED(reg);
}

static constexpr struct ggml_backend_reg_i ggml_backend_neuron_reg_i = [] {
    struct ggml_backend_reg_i i = {};
    i.get_name                  = ggml_backend_neuron_reg_get_name;
    i.get_device_count          = ggml_backend_neuron_reg_get_device_count;
    i.get_device                = ggml_backend_neuron_reg_get_device;
    i.get_proc_address          = ggml_backend_neuron_reg_get_proc_address;
    return i;
}();

static struct ggml_backend_reg g_reg = [] {
    struct ggml_backend_reg reg = {};
    reg.api_version             = GGML_BACKEND_API_VERSION;
    reg.iface                   = ggml_backend_neuron_reg_i;
    return reg;
}();

// How long the exit of the process waits for the NeuronCores.
static constexpr auto MAX_RELEASE = std::chrono::seconds(5);

// Reports why there are no devices.
static void ggml_backend_neuron_no_devices(const std::string & why) {
    NEURON_WARN("no devices%s: %s\n", neuron_recording() ? ", and nothing is recorded" : "", why.c_str());
}

// Opens the kernels for the machine that libnrt reports. Returns whether the devices have work to do.
static bool ggml_backend_neuron_open_kernels(ggml_backend_neuron_reg_context & shared) {
    const neuron_nrt & nrt = *shared.nrt;
    NEURON_LOG("%s, version %llu.%llu.%llu %s, %u cores\n", nrt.path.c_str(), (unsigned long long) nrt.version.rt_major,
               (unsigned long long) nrt.version.rt_minor, (unsigned long long) nrt.version.rt_patch,
               nrt.version.rt_detail, nrt.n_cores);
    for (const std::string & remark : nrt.remarks) {
        NEURON_WARN("%s\n", remark.c_str());
    }
    neuron_record_target(nrt.target, nrt.lnc);
#ifdef GGML_NEURON_EMBEDDED
    ggml_backend_neuron_register_embedded();
#endif
    shared.kernels.open(nrt, ggml_backend_neuron_embedded());
    neuron_costs::use(shared.kernels.target(), shared.kernels.lnc(), neuron_queue_depth(nrt) > 1);
    shared.buffers = ggml_backend_neuron_choose_buffers(shared.kernels);
    NEURON_LOG("%zu kernels in %zu bundles; tensors in %s memory\n", shared.kernels.n_kernels(),
               shared.kernels.n_bundles(), shared.buffers == neuron_buffers::DEVICE ? "device" : "host");
    // A device without kernels does harm: llama.cpp turns flash attention off for it, and puts weights there.
    if (shared.kernels.n_kernels() == 0 && !neuron_recording()) {
        const bool named = !neuron_variable("GGML_NEURON_KERNEL_DIR").empty();
        ggml_backend_neuron_no_devices(named ? "GGML_NEURON_KERNEL_DIR has no kernels that can be used here"
                                             : "no kernels" NEURON_NEXT_LINE
                                               "GGML_NEURON_KERNEL_DIR names where they are" NEURON_NEXT_LINE
                                               "to record the graphs that a program computes: GGML_NEURON_RECORD=FILE");
        return false;
    }
    return true;
}

// GGML_NEURON_REPACK=0 keeps all weights in ggml's order.
static bool ggml_backend_neuron_repacks() {
    neuron_repack_threads();  // reports an invalid value before weights are loaded
    return neuron_switch("GGML_NEURON_REPACK", true);
}

static void ggml_backend_neuron_add_buffer_type(const neuron_kernel_store &          kernels,
                                                ggml_backend_neuron_device_context & device,
                                                ggml_backend_dev_t                   dev,
                                                int32_t                              layout) {
    neuron_buffer_type & type = device.buffer_types[layout];
    type.context              = { &device, layout, device.name };
    type.buft.iface           = ggml_backend_neuron_buffer_type_i;
    type.buft.device          = dev;
    type.buft.context         = &type.context;
    if (layout) {
        type.context.name += std::string("_") + neuron_layout_name(layout);
    }
    if (layout && ggml_backend_neuron_repacks() && kernels.has_layout(layout)) {
        neuron_repacked_files();  // reports unusable files before weights are loaded
        device.extra_bufts.push_back(&type.buft);
    }
}

static void ggml_backend_neuron_add_device(ggml_backend_neuron_reg_context & shared, uint32_t core) {
    const neuron_nrt & nrt    = *shared.nrt;
    auto               device = std::make_unique<ggml_backend_neuron_device_context>(shared.kernels);
    device->name              = "NEURON" + std::to_string(core);
    device->description       = nrt.simulator        ? "NeuronCore, simulated on the CPU"
                                : nrt.target.empty() ? "AWS NeuronCore"
                                                     : "AWS NeuronCore (" + nrt.target + ")";
    device->core              = std::make_unique<neuron_core>(nrt, (int) core);

    shared.devices.emplace_back();
    shared.devices.back().iface   = ggml_backend_neuron_device_i;
    shared.devices.back().reg     = &g_reg;
    shared.devices.back().context = device.get();
    for (int32_t layout = 0; layout <= NEURON_KERNELS_LAST_FORM; layout++) {
        ggml_backend_neuron_add_buffer_type(shared.kernels, *device, &shared.devices.back(), layout);
    }
    device->extra_bufts.push_back(NULL);
    device->host_name        = device->name + "_Host";
    device->host_buffer_type = neuron_kept_buffer_type(&shared.devices.back(), device->host_name.c_str());
    shared.contexts.push_back(std::move(device));
}

#ifdef GGML_NEURON_GGML_VERSION
// Returns whether a later ggml gives the numbers of this plugin's header to its ops, and the same size to a tensor behind
// its ggml_object.
static bool ggml_backend_neuron_has_same_ops() {
    return ggml_tensor_overhead() == sizeof(ggml_tensor) + 32 &&
           strcmp(ggml_op_name(GGML_OP_MUL_MAT), "MUL_MAT") == 0 && strcmp(ggml_op_name(GGML_OP_GLU), "GLU") == 0 &&
           strcmp(ggml_unary_op_name(GGML_UNARY_OP_TRUNC), "TRUNC") == 0 &&
           strcmp(ggml_glu_op_name(GGML_GLU_OP_SWIGLU_CLAMP), "SWIGLU_CLAMP") == 0;
}

// Returns why the backend can't work with the ggml that loads it; "" when it can. ggml itself refuses a plugin of
// another GGML_BACKEND_API_VERSION. That number stays the same when a new op changes the numbers of later ones. An older
// ggml may lack ops.
static std::string ggml_backend_neuron_other_ggml() {
    const auto number = [](const char * version) {
        std::pair<int, int> major_minor;
        sscanf(version, "%d.%d", &major_minor.first, &major_minor.second);
        return major_minor;
    };
    const auto loaded = number(ggml_version());
    const auto built  = number(GGML_NEURON_GGML_VERSION);
    if (loaded == built) {
        return "";
    }
    const std::string versions = std::string("the plugin was built for ggml " GGML_NEURON_GGML_VERSION ", and ggml ") +
                                 ggml_version() + " loads it";
    if (loaded.first == built.first && loaded > built && ggml_backend_neuron_has_same_ops()) {
        NEURON_LOG("%s\n", versions.c_str());
        return "";
    }
    return versions + NEURON_NEXT_LINE
           "build it again with the sources of that llama.cpp (-DGGML_NEURON_LLAMA_DIR=...)";
}
#endif

// Never destroyed: destructors that run later than the backend's may free buffers.
ggml_backend_neuron_reg_context & ggml_backend_neuron_shared() {
    static ggml_backend_neuron_reg_context * context = [] {
        auto *      shared = new ggml_backend_neuron_reg_context;
        std::string message;
        neuron_warn_of_unknown_variables();
        neuron_fallback_bytes();  // reports an invalid variable now, not when the first weight is kept
#ifdef GGML_NEURON_GGML_VERSION
        message = ggml_backend_neuron_other_ggml();
        if (!message.empty()) {
            ggml_backend_neuron_no_devices(message);
            return shared;
        }
#endif
        shared->nrt = neuron_nrt_get(message);
        if (!shared->nrt) {
            // Without the library, and with no variable set, the user expects no devices.
            if (neuron_any_variable() || message.rfind("no libnrt: ", 0) != 0) {
                ggml_backend_neuron_no_devices(message);
            }
            return shared;
        }
        if (!ggml_backend_neuron_open_kernels(*shared)) {
            return shared;
        }
        const uint32_t n_devices = shared->nrt->n_cores <= NEURON_MAX_CORES
                                       ? shared->nrt->n_cores
                                       : neuron_most_ranks(shared->nrt->target, NEURON_MAX_CORES);
        if (n_devices < shared->nrt->n_cores) {
            NEURON_WARN("%u of %u NeuronCores are used: ggml's scheduler takes %u devices beside the CPU\n"
                        "only some numbers of cores compute one program (-sm tensor)\n"
                        "to choose others, set NEURON_RT_VISIBLE_CORES\n",
                        n_devices, shared->nrt->n_cores, NEURON_MAX_CORES);
        }
        shared->devices.reserve(n_devices);
        for (uint32_t i = 0; i < n_devices; i++) {
            ggml_backend_neuron_add_device(*shared, i);
        }
        if (shared->devices.empty()) {
            ggml_backend_neuron_no_devices(shared->nrt->path + " finds no NeuronCore");
        }
        // Registered after libnrt's handler, so it runs before libnrt is closed.
        atexit([] {
            if (ggml_backend_neuron_shared().nrt->is_forked()) {
                return;
            }
            const std::string nothing = neuron_nothing_computed();
            if (!nothing.empty()) {
                NEURON_WARN("%s\n", nothing.c_str());
            }
            // A thread that another one, or libnrt, never lets continue does not hold up the exit.
            auto released = std::make_shared<std::promise<void>>();
            std::thread([released] {
                for (auto & device : ggml_backend_neuron_shared().contexts) {
                    device->core->release();
                }
                released->set_value();
            }).detach();
            if (released->get_future().wait_for(MAX_RELEASE) != std::future_status::ready) {
                NEURON_WARN("the NeuronCores are busy: the process ends without waiting for them\n");
            }
        });
        return shared;
    }();
    return *context;
}

ggml_backend_reg_t ggml_backend_neuron_reg(void) {
    ggml_backend_neuron_shared();
    return &g_reg;
}

GGML_BACKEND_DL_IMPL(ggml_backend_neuron_reg)
