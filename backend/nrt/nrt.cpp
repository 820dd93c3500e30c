#include "nrt.h"

#include "../bundle/src/ascii.h"
#include "targets.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

// The library's own text for a status, or ours when it has none.
std::string neuron_nrt::describe(const char * function, NRT_STATUS status) const {
    const char * text = nrt_get_status_as_str ? nrt_get_status_as_str(status) : nullptr;
    return std::string(function) + " failed: " + (text && *text ? text : "status") + " (" +
           std::to_string((int) status) + ")";
}

// Binds every function; returns the name of the first required one that is missing, or NULL.
static const char * bind_functions(void * handle, neuron_nrt & nrt) {
    const char * missing = nullptr;
#define NEURON_NRT_BIND(name) nrt.name = (decltype(nrt.name)) dlsym(handle, #name);
#define NEURON_NRT_CHECK(name)   \
    if (!nrt.name && !missing) { \
        missing = #name;         \
    }
    NRT_FUNCTIONS_REQUIRED(NEURON_NRT_BIND)
    NRT_FUNCTIONS_OPTIONAL(NEURON_NRT_BIND)
    NRT_FUNCTIONS_REQUIRED(NEURON_NRT_CHECK)
#undef NEURON_NRT_BIND
#undef NEURON_NRT_CHECK
    return missing;
}

// Returns the value of neuronx-cc's --target for the machine, or "" when the library does not say.
static std::string target_of(const neuron_nrt & nrt) {
    nrt_instance_info_t info{};
    if (!nrt.nrt_get_instance_info || nrt.nrt_get_instance_info(&info, sizeof(info)) != NRT_SUCCESS) {
        return "";
    }
    const std::string target = neuron_target_of_family(info.family);
    if (!target.empty()) {
        return target;  // as AWS's frameworks decide; the name is of an architecture, which instances share
    }
    char name[sizeof(info.arch_name) + 1] = {};
    memcpy(name, info.arch_name, sizeof(info.arch_name));
    return neuron_target_of(nk::lower(name));
}

// Leaves the NeuronCores that could not be used to other processes.
static void limit_cores(const neuron_nrt & nrt) {
    uint32_t   total  = 0;
    const bool chosen = getenv("NEURON_RT_VISIBLE_CORES") || getenv("NEURON_RT_NUM_CORES");
    // may be called before nrt_init
    if (!chosen && nrt.nrt_get_total_vnc_count && nrt.nrt_get_total_vnc_count(&total) == NRT_SUCCESS &&
        total > NEURON_MAX_CORES) {
        setenv("NEURON_RT_NUM_CORES", std::to_string(NEURON_MAX_CORES).c_str(), 0);
    }
}

static const neuron_nrt * load(std::string & message) {
    const char *             chosen = getenv("GGML_NEURON_LIBNRT");
    std::vector<std::string> paths;
    if (chosen && *chosen) {
        paths.push_back(chosen);
    } else {
        paths = { "/opt/aws/neuron/lib/libnrt.so.1", "libnrt.so.1" };
    }

    // The binding is never freed: see `users`. The same holds for the library, whose threads may outlive any caller.
    auto * nrt    = new neuron_nrt;
    void * handle = nullptr;
    for (const std::string & path : paths) {
        handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle) {
            nrt->path = path;
            break;
        }
        const char * reason = dlerror();
        message += (message.empty() ? "" : "; ") + std::string(reason ? reason : path.c_str());
    }
    if (!handle) {
        message = "no libnrt: " + message;
        delete nrt;
        return nullptr;
    }
    if (const char * missing = bind_functions(handle, *nrt)) {
        message = nrt->path + " lacks the function " + missing;
        delete nrt;
        return nullptr;
    }
    limit_cores(*nrt);
    NRT_STATUS status = nrt->nrt_init(NRT_FRAMEWORK_TYPE_NO_FW, "", "");
    if (status != NRT_SUCCESS) {
        message = nrt->path + ": " + nrt->describe("nrt_init", status) + ": no NeuronCore for this process?";
        delete nrt;
        return nullptr;
    }
    if (nrt->nrt_get_version(&nrt->version, sizeof(nrt->version)) != NRT_SUCCESS) {
        nrt->version = {};
    }
    nrt->version.rt_detail[sizeof(nrt->version.rt_detail) - 1] = '\0';
    nrt->simulator                                             = strstr(nrt->version.rt_detail, "simulator") != nullptr;
    status                                                     = nrt->nrt_get_visible_vnc_count(&nrt->n_cores);
    if (status != NRT_SUCCESS) {
        message = nrt->path + ": " + nrt->describe("nrt_get_visible_vnc_count", status);
        nrt->nrt_close();
        delete nrt;
        return nullptr;
    }
    nrt->target = target_of(*nrt);
    return nrt;
}

static const neuron_nrt * g_nrt = nullptr;

const neuron_nrt * neuron_nrt_get(std::string & message) {
    static std::once_flag once;
    static std::string *  first_message = new std::string;  // read at exit, too
    std::call_once(once, [] {
        g_nrt = load(*first_message);
        if (g_nrt) {
            atexit([] {
                if (g_nrt->users == 0) {
                    g_nrt->nrt_close();
                }
            });
        }
    });
    message = *first_message;
    return g_nrt;
}
