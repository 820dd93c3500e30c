#include "report/profile.h"

#include "report/environment.h"
#include "report/log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>

namespace {

// Returns a text as the inside of a JSON string.
std::string escaped(const std::string & text) {
    std::string result;
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            result += '\\';
            result += c;
        } else if ((unsigned char) c < 0x20) {
            result += ' ';
        } else {
            result += c;
        }
    }
    return result;
}

class trace_file {
  public:
    trace_file() : path(neuron_variable("GGML_NEURON_PROFILE")) {
        if (!path.empty()) {
            open();
        }
    }

    ~trace_file() {
        if (!file) {
            return;
        }
        fputs(empty ? "[]\n" : "\n]\n", file);
        const bool written = !ferror(file);
        if (fclose(file) != 0 || !written) {
            NEURON_ERROR("GGML_NEURON_PROFILE: %s: the profile is incomplete: %s\n", path.c_str(), strerror(errno));
        } else {
            NEURON_LOG("GGML_NEURON_PROFILE: %s has %" PRIu64 " launches\n", path.c_str(), n_launches);
        }
    }

    bool is_open() const { return file != nullptr; }

    void add(const neuron_profiled_launch & launch) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (cores.insert(launch.core).second) {
            fprintf(
                file,
                "%s{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"NeuronCore %d\"}}",
                separator(), (int) getpid(), launch.core, launch.core);
        }
        const double begin = (double) launch.begin / 1e3;
        const double us    = (double) (launch.end - launch.begin) / 1e3;
        fprintf(file,
                "%s{\"name\":\"%s\",\"cat\":\"launch\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,"
                "\"args\":{\"node\":\"%s\",\"bytes_read\":%zu,\"bytes_written\":%zu,\"failed\":%s}}",
                separator(), escaped(launch.kernel).c_str(), (int) getpid(), launch.core, begin, us,
                escaped(launch.node).c_str(), launch.bytes_read, launch.bytes_written,
                launch.failed ? "true" : "false");
        n_launches++;
    }

  private:
    void open() {
        // Opening a FIFO would wait for a reader.
        const int   descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
        struct stat status;
        std::string wrong;
        if (descriptor < 0 || fstat(descriptor, &status) != 0) {
            wrong = strerror(errno);
        } else if (!S_ISREG(status.st_mode)) {
            wrong = "it is not a regular file";
        } else if (ftruncate(descriptor, 0) != 0 || !(file = fdopen(descriptor, "w"))) {
            wrong = strerror(errno);
        }
        if (!file) {
            if (descriptor >= 0) {
                close(descriptor);
            }
            NEURON_ERROR("GGML_NEURON_PROFILE: %s can't be written: %s\n", path.c_str(), wrong.c_str());
        }
    }

    const char * separator() {
        const char * found = empty ? "[\n" : ",\n";
        empty              = false;
        return found;
    }

    const std::string path;
    FILE *            file = nullptr;
    std::mutex        mutex;
    std::set<int>     cores;
    bool              empty      = true;
    uint64_t          n_launches = 0;
};

trace_file & trace() {
    static trace_file instance;
    return instance;
}

}  // namespace

bool neuron_profiling() {
    return trace().is_open();
}

int64_t neuron_profile_time() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void neuron_profile(const neuron_profiled_launch & launch) {
    trace().add(launch);
}
