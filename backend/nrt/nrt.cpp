#include "nrt.h"

#include "../bundle/src/ascii.h"
#include "targets.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <vector>

// Returns the library's text for a status, or "status" if the library has none.
std::string neuron_nrt::describe(const char * function, NRT_STATUS status) const {
    const char * text = nrt_get_status_as_str ? nrt_get_status_as_str(status) : nullptr;
    return std::string(function) + " failed: " + (text && *text ? text : "status") + " (" +
           std::to_string((int) status) + ")";
}

// Returns a function of the library, or NULL. The asynchronous ones are those of NRT_3.0.0: functions of the same names and
// of an earlier version take an error tracker among their arguments. Source: release notes of AWS Neuron's runtime,
// breaking changes.
static void * find_function(void * handle, const char * name) {
    return strncmp(name, "nrta_", 5) == 0 ? dlvsym(handle, name, "NRT_3.0.0") : dlsym(handle, name);
}

// Binds every function. Returns the name of the first required function that is missing, or NULL.
static const char * bind_functions(void * handle, neuron_nrt & nrt) {
    const char * missing = nullptr;
#define NEURON_NRT_BIND(name) nrt.name = (decltype(nrt.name)) find_function(handle, #name);
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

// Sets `target` to the value of neuronx-cc's --target for the machine, or "" for an unknown machine. Returns false when
// the library does not report the machine: AWS does not document that it does so before it is initialized.
// GGML_NEURON_TARGET names the target for both.
static bool read_target(const neuron_nrt & nrt, std::string & target) {
    const char * chosen = getenv("GGML_NEURON_TARGET");
    if (chosen && *chosen) {
        target = chosen;
        return true;
    }
    nrt_instance_info_t info{};
    if (!nrt.nrt_get_instance_info || nrt.nrt_get_instance_info(&info, sizeof(info)) != NRT_SUCCESS) {
        return false;
    }
    // AWS's frameworks also decide by the family; arch_name is the name of an architecture that several instances share
    target = neuron_target_of_family(info.family);
    if (target.empty()) {
        char name[sizeof(info.arch_name) + 1] = {};
        memcpy(name, info.arch_name, sizeof(info.arch_name));
        target = neuron_target_of(nk::lower(name));
    }
    return true;
}

// Reads the number of physical cores per logical core: from libnrt, else from what AWS's libnrt reads, else the target's
// default. AWS's file is in the folder above the library's: /opt/aws/neuron/logical_nc_config.
static void read_lnc(neuron_nrt & nrt) {
    nrt.lnc_source = "libnrt";
    if (nrt.nec_get_virtual_core_size && nrt.nec_get_virtual_core_size(&nrt.lnc) == NRT_SUCCESS && nrt.lnc > 0) {
        return;
    }
    for (const char * name : { "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE" }) {
        const char * value = getenv(name);
        if (value && *value) {
            nrt.lnc        = (uint32_t) atoi(value);
            nrt.lnc_source = name;
            return;
        }
    }
    Dl_info library = {};
    if (dladdr((const void *) nrt.nrt_init, &library)) {
        const std::string folder = std::string(library.dli_fname).substr(0, std::string(library.dli_fname).rfind('/'));
        nrt.lnc_source           = folder.substr(0, folder.rfind('/') + 1) + "logical_nc_config";
        if (std::ifstream(nrt.lnc_source) >> nrt.lnc) {
            return;
        }
    }
    nrt.lnc        = neuron_default_lnc(nrt.target);
    nrt.lnc_source = nrt.lnc ? "the default of " + nrt.target : "";
}

// Returns the number of cores in a list such as "3", "0-3" or "0,2,4-5"; 0 when the text is not such a list.
static uint32_t count_listed(const std::string & list) {
    uint32_t           count = 0;
    std::istringstream parts(list);
    for (std::string part; std::getline(parts, part, ',');) {
        unsigned  first = 0;
        unsigned  last  = 0;
        char      rest  = 0;
        const int read  = sscanf(part.c_str(), "%u-%u%c", &first, &last, &rest);
        if (read == 1 && part.find_first_not_of("0123456789") == std::string::npos) {
            count++;
        } else if (read == 2 && first <= last && last - first < 4096) {
            count += last - first + 1;
        } else {
            return 0;
        }
    }
    return count;
}

// Returns how many cores AWS's variables choose, or 0 for all: NEURON_RT_NUM_CORES=0 also means all. Source: AWS Neuron,
// "Neuron Runtime configuration". Any other text counts as one core: nrt_init reports what is wrong with it.
static uint32_t count_selected_cores() {
    const char * visible = getenv("NEURON_RT_VISIBLE_CORES");
    const char * number  = getenv("NEURON_RT_NUM_CORES");
    if (visible && *visible) {
        return std::max(count_listed(visible), 1u);
    }
    return number ? (uint32_t) std::max(atoi(number), 0) : 0;
}

// Decides how many NeuronCores this process has. Returns "", or why there are none.
static std::string count_cores(neuron_nrt & nrt) {
    nrt.n_cores             = count_selected_cores();
    nrt.has_selected_cores  = nrt.n_cores > 0;
    // AWS allows this call before nrt_init
    uint32_t         total  = 0;
    const NRT_STATUS status = nrt.nrt_get_total_vnc_count ? nrt.nrt_get_total_vnc_count(&total) : NRT_FAILURE;
    if (status != NRT_SUCCESS) {
        return nrt.has_selected_cores ? ""
                                      : nrt.path + ": " + nrt.describe("nrt_get_total_vnc_count", status) +
                                            ": no NeuronCore? NEURON_RT_VISIBLE_CORES names those to use";
    }
    const uint32_t most = nrt.has_selected_cores ? nrt.n_cores : neuron_most_ranks(nrt.target, NEURON_MAX_CORES);
    nrt.n_cores         = std::min(most, total);
    nrt.is_limited      = !nrt.has_selected_cores && total > nrt.n_cores;
    return "";
}

// Returns whether the library's runtime belongs to release 2.`release` of the SDK or a later one. The runtime's minor
// version is the SDK's plus 2: SDK 2.29 has runtime 2.31. Returns false for a library without a version.
static bool has_release(const neuron_nrt & nrt, uint64_t release) {
    return nrt.version.rt_major > 2 || (nrt.version.rt_major == 2 && nrt.version.rt_minor >= release + 2);
}

// Returns whether the library queues launches, with functions as nrt_api.h declares them. The simulator's library has
// these functions in every simulated release.
static bool has_queues(const neuron_nrt & nrt) {
    return nrt.nrta_execute_schedule && nrt.nrta_is_completed && has_release(nrt, 29);
}

// Reads how many requests the user allows in flight. Before SDK 2.32 the variable also makes nrt_execute return before
// the execution is complete, with no way to detect completion. This function turns that off before the library is
// initialized.
static void limit_requests(neuron_nrt & nrt) {
    const char * name  = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS";
    const char * value = getenv(name);
    const long   limit = value ? atol(value) : 0;
    if (limit <= 0) {
        return;
    }
    if (nrt.has_queues) {
        nrt.max_in_flight = (size_t) limit;
    }
    if (!has_release(nrt, 32)) {
        nrt.remarks.push_back(std::string(name) + " is set to 0, not " + value +
                              ": with this runtime nrt_execute would return before its results are there");
        setenv(name, "0", 1);
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

    // The binding is never freed (see `users`), and the library stays loaded, because its threads may outlive any
    // caller.
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
    if (nrt->nrt_get_version(&nrt->version, sizeof(nrt->version)) != NRT_SUCCESS) {
        nrt->version = {};
    }
    nrt->version.rt_detail[sizeof(nrt->version.rt_detail) - 1] = '\0';
    nrt->simulator                                             = strstr(nrt->version.rt_detail, "simulator") != nullptr;
    nrt->has_queues                                            = has_queues(*nrt);
    if (!nrt->has_queues) {
        nrt->remarks.push_back("a launch begins when the one before it is done: " + nrt->path +
                               " has no asynchronous functions of version NRT_3.0.0 (SDK 2.29 and later)");
    }
    limit_requests(*nrt);
    if (!read_target(*nrt, nrt->target) && nrt->nrt_get_instance_info) {
        nrt->remarks.push_back(
            "libnrt does not report the machine before it is initialized: GGML_NEURON_TARGET names it");
    }
    message = count_cores(*nrt);
    if (!message.empty()) {
        delete nrt;
        return nullptr;
    }
    read_lnc(*nrt);
    return nrt;
}

// Sets the address at which ranks meet, unless it is set: AWS requires it of programs with collectives, before nrt_init.
// Another program may take the port before libnrt does.
static void choose_root_comm() {
    const int   fd      = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    socklen_t   size    = sizeof(address);
    address.sin_family  = AF_INET;
    address.sin_addr    = { htonl(INADDR_LOOPBACK) };
    if (bind(fd, (sockaddr *) &address, size) == 0 && getsockname(fd, (sockaddr *) &address, &size) == 0) {
        const std::string root = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
        setenv("NEURON_RT_ROOT_COMM_ID", root.c_str(), 0);
    }
    close(fd);
}

void neuron_nrt::initialize() const {
    if (is_limited) {
        setenv("NEURON_RT_NUM_CORES", std::to_string(n_cores).c_str(), 1);
    }
    if (n_cores != 1) {
        choose_root_comm();
    }
    NRT_STATUS status = nrt_init(NRT_FRAMEWORK_TYPE_NO_FW, "", "");
    if (status != NRT_SUCCESS) {
        failure = path + ": " + describe("nrt_init", status) + ": no NeuronCore for this process?";
        return;
    }
    uint32_t visible = 0;
    status           = nrt_get_visible_vnc_count(&visible);
    if (status != NRT_SUCCESS) {
        failure = path + ": " + describe("nrt_get_visible_vnc_count", status);
    } else if (visible < n_cores) {
        failure = path + ": " + std::to_string(n_cores) + " NeuronCores were expected, and the process has " +
                  std::to_string(visible);
    }
    if (!failure.empty()) {
        nrt_close();
        return;
    }
    open = true;
}

const std::string & neuron_nrt::init() const {
    std::call_once(once, [this] { initialize(); });
    return failure;
}

bool neuron_nrt::is_forked() const {
    return getpid() != process;
}

static const neuron_nrt * g_nrt = nullptr;

const neuron_nrt * neuron_nrt_get(std::string & message) {
    static std::once_flag once;
    static std::string *  first_message = new std::string;  // also read at exit
    std::call_once(once, [] {
        g_nrt = load(*first_message);
        if (g_nrt) {
            atexit([] {
                if (g_nrt->is_open() && g_nrt->users == 0 && !g_nrt->is_forked()) {
                    g_nrt->nrt_close();
                }
            });
        }
    });
    message = *first_message;
    return g_nrt;
}
