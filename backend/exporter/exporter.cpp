// Prints the graphs that llama.cpp builds for a model, from only the model's header. docs/reference/graphs.md describes
// the format.
//
// It uses llama.cpp itself: it loads the model without its weights, tracks the cells of the KV cache in a context as in a
// run, and writes each graph instead of computing it. It computes nothing and reads no weight.
//
// llama.cpp aborts on failed assertions (GGML_ASSERT), and a hostile file may do worse. So a child process does the work
// with limits of memory and time, and the parent reports how the child ended.

#include "../graph/graph_writer.h"
#include "complaints.h"
#include "ggml-backend.h"
#include "llama.h"
#include "model_graphs.h"
#include "models.h"
#include "options.h"
#include "projector.h"
#include "projector_graphs.h"
#include "sparse_file.h"

#include <dlfcn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// A model of 500 layers in a context of 16 million cells needs 3 GiB and a minute; the allocation
// fails for a header that needs more.
constexpr rlim_t MAX_ADDRESS_SPACE       = (rlim_t) 16 << 30;
constexpr rlim_t MAX_CPU_SECONDS         = 300;
// llama.cpp reserves 2 x 370 MB of address space for each device and buffer of its meta backend.
constexpr rlim_t ADDRESS_SPACE_OF_DEVICE = (rlim_t) 6 << 30;

// If llama.cpp's backends are separate libraries, loads only the CPU backend, from ggml's own folder: graphs do not depend
// on the backend, and other backends would open their devices.
void load_cpu_backend() {
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
        return;
    }
    Dl_info info;
    if (!dladdr((const void *) ggml_version, &info) || !info.dli_fname) {
        throw std::runtime_error("can't find the folder that ggml was loaded from");
    }
    namespace fs                 = std::filesystem;
    const fs::path        folder = fs::path(info.dli_fname).parent_path();
    std::vector<fs::path> found;
    for (const auto & entry : fs::directory_iterator(folder)) {
        if (entry.path().filename().string().rfind("libggml-cpu", 0) == 0 && entry.path().extension() == ".so") {
            found.push_back(entry.path());
        }
    }
    std::sort(found.begin(), found.end());
    for (const fs::path & path : found) {
        if (ggml_backend_load(path.c_str())) {
            return;
        }
    }
    throw std::runtime_error("no CPU backend of ggml (libggml-cpu*.so) in " + folder.string());
}

// Returns whether a loaded library has the version that this program was built for. Development versions have a suffix.
bool same_version(const std::string & loaded, const std::string & built_for) {
    return loaded.compare(0, built_for.size(), built_for) == 0 &&
           (loaded.size() == built_for.size() || loaded[built_for.size()] == '-');
}

void check_versions() {
    if (!same_version(ggml_version(), EXPORTER_GGML_VERSION) ||
        !same_version(llama_version(), EXPORTER_LLAMA_VERSION)) {
        throw std::runtime_error(std::string("this program was built for llama.cpp " EXPORTER_LLAMA_VERSION
                                             " with ggml " EXPORTER_GGML_VERSION " and has loaded llama.cpp ") +
                                 llama_version() + " with ggml " + ggml_version() + ": build it again");
    }
}

// Opens a model's files. gguf logs the reason when it refuses one.
std::vector<sparse_file> open_files(const std::string & path) {
    try {
        std::vector<sparse_file> files = open_model_files(path);
        last_complaint.clear();
        return files;
    } catch (const std::runtime_error & error) {
        throw std::runtime_error(error.what() + (last_complaint.empty() ? "" : ": " + last_complaint));
    }
}

void export_model(const options & opts) {
    std::vector<sparse_file> files = open_files(opts.model);
    if (opts.ftype >= 0) {
        quantize(files, (llama_ftype) opts.ftype);
    }
    std::vector<sparse_file> others;
    if (!opts.model_draft.empty()) {
        model_name = opts.model_draft;
        others     = open_files(opts.model_draft);
        model_name = opts.model;
    }
    if (opts.draft && !others.empty()) {
        std::swap(files, others);
    }
    write_model_graphs(opts, files, others);
}

void export_graphs(const options & opts) {
    check_versions();
    load_cpu_backend();
    if (opts.mmproj.empty()) {
        export_model(opts);
    } else {
        export_projector(opts);
    }
    if (fflush(stdout) != 0 || ferror(stdout)) {
        throw std::runtime_error(std::string("can't write the graphs: ") + strerror(errno));
    }
}

void limit(int resource, rlim_t most) {
    rlimit current;
    if (getrlimit(resource, &current) == 0) {
        current.rlim_cur = std::min(most, current.rlim_max);
        setrlimit(resource, &current);
    }
}

[[noreturn]] void run_child(const options & opts, const std::string & file, pid_t parent) {
    model_name = file;
    // the child ends when the parent is killed
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(EXIT_BAD_INPUT);
    }
#ifndef __SANITIZE_ADDRESS__  // which reserves terabytes of address space
    limit(RLIMIT_AS, MAX_ADDRESS_SPACE + (opts.split_tensors ? opts.n_devices * ADDRESS_SPACE_OF_DEVICE : 0));
#endif
    limit(RLIMIT_CPU, MAX_CPU_SECONDS);
    limit(RLIMIT_CORE, 0);
    ggml_log_set(note_complaint, nullptr);
    llama_log_set(note_complaint, nullptr);
    projector::log_to(note_complaint);
    ggml_set_abort_callback(give_up_on_abort);
    try {
        export_graphs(opts);
    } catch (const std::bad_alloc &) {
        give_up("the model requires more memory than " + std::to_string(MAX_ADDRESS_SPACE >> 30) + " GiB");
    } catch (const std::exception & error) {
        give_up(error.what());
    }
    // not exit(): llama.cpp's cleanup is unnecessary at the end of the process
    _exit(0);
}

}  // namespace

int main(int argc, char ** argv) {
    options     opts;
    std::string mistake;
    if (!parse_options(argc, argv, opts, mistake)) {
        if (mistake.empty()) {
            printf("%s", usage().c_str());
            return 0;
        }
        fprintf(stderr, "error: %s\n%s", mistake.c_str(), usage().c_str());
        return EXIT_BAD_INPUT;
    }
    if (opts.version) {
        printf("export-graphs format %d, for llama.cpp %s with ggml %s\n", GRAPH_FORMAT_VERSION, EXPORTER_LLAMA_VERSION,
               EXPORTER_GGML_VERSION);
        return 0;
    }
    const std::string file   = opts.mmproj.empty() ? opts.model : opts.mmproj;
    const pid_t       parent = getpid();
    const pid_t       child  = fork();
    if (child < 0) {
        perror("error: fork");
        return 1;
    }
    if (child == 0) {
        run_child(opts, file, parent);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFSIGNALED(status)) {
        fprintf(stderr, "error: %s: llama.cpp crashes on this model (%s): the file is damaged, or made to do harm\n",
                file.c_str(), strsignal(WTERMSIG(status)));
        return EXIT_BAD_INPUT;
    }
    const int code = WEXITSTATUS(status);
    if (code != 0 && code != EXIT_BAD_INPUT) {
        fprintf(stderr, "error: %s: llama.cpp ends the program with exit status %d\n", file.c_str(), code);
        return EXIT_BAD_INPUT;
    }
    return code;
}
