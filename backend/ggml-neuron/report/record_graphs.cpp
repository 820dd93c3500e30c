#include "report/record_graphs.h"

#include "../../graph/graph_writer.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "report/environment.h"
#include "report/recording_file.h"
#include "select/group_key.h"
#include "select/kernel_store.h"
#include "select/tensors.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

// The beginning of each recording; the backend appends to no other file.
constexpr const char * BEGINNING = "{\"format\":\"neuron-kernelgen graphs\"";

// Returns the first line of the file. It states no model, because the backend does not have its name.
std::string first_line() {
    json_line out;
    out.begin_object();
    out.text("format", "neuron-kernelgen graphs");
    out.integer("version", GRAPH_FORMAT_VERSION);
    out.text("ggml", ggml_version());
    out.text("llama_cpp", "");
    out.begin_object("model");
    for (const char * key : { "architecture", "name", "description" }) {
        out.text(key, strcmp(key, "name") == 0 ? "" : "recorded");
    }
    for (const char * key : { "parameters", "bytes", "layers", "context_length" }) {
        out.integer(key, 0);
    }
    for (const char * key : { "encoder", "decoder", "recurrent" }) {
        out.boolean(key, false);
    }
    out.end_object();
    out.end_object();
    return out.written() + "\n";
}

// The roles of tensors in the device's part of a graph: a tensor that is read outside of the part is an output.
class roles {
  public:
    explicit roles(const ggml_cgraph * cgraph) : cgraph(cgraph) {
        for (int i = 0; i < cgraph->n_nodes; i++) {
            uses.emplace(cgraph->nodes[i], 0);
        }
        for (int i = 0; i < cgraph->n_nodes; i++) {
            for (const ggml_tensor * src : cgraph->nodes[i]->src) {
                const auto found = uses.find(src);
                if (found != uses.end()) {
                    found->second++;
                }
            }
        }
    }

    const char * operator()(const ggml_tensor * t) const {
        const auto found = uses.find(t);
        if (found == uses.end()) {
            return t->flags & GGML_TENSOR_FLAG_INPUT                                    ? "input"
                   : t->buffer && t->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS ? "weight"
                                                                                        : nullptr;
        }
        const int64_t all = neuron_uses_in_graph(cgraph, t);
        return all < 0 || found->second < all || (t->flags & GGML_TENSOR_FLAG_OUTPUT) ? "output" : nullptr;
    }

  private:
    const ggml_cgraph *                              cgraph;
    std::unordered_map<const ggml_tensor *, int64_t> uses;
};

json_line tensors_of(ggml_cgraph * cgraph) {
    const roles  role_of(cgraph);
    json_line    out;
    graph_writer writer(out, std::cref(role_of));
    out.begin_array("tensors");
    int begin = 0;  // the place behind the last sum
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (neuron_is_all_reduce(node)) {
            ggml_cgraph part = ggml_graph_view(cgraph, begin, i);
            writer.write(&part);
            writer.write_all_reduce(node->src[0], node->op_params[0]);
            begin = i + 1;
        }
    }
    ggml_cgraph rest = ggml_graph_view(cgraph, begin, cgraph->n_nodes);
    writer.write(&rest);
    out.end_array();
    return out;
}

// Returns the line of a graph that some of `n_devices` devices compute. Without devices, tensors are not split.
std::string line_of(const json_line & tensors, const std::vector<size_t> & devices = {}, size_t n_devices = 1) {
    json_line out;
    out.begin_object();
    out.begin_object("sizes");
    out.end_object();
    out.begin_object("context");
    out.end_object();
    if (!devices.empty()) {
        out.begin_object("split");
        out.text("mode", "tensor");
        out.integer("devices", (int64_t) n_devices);
        out.begin_array("of");
        for (const size_t device : devices) {
            out.number((int64_t) device);
        }
        out.end_array();
        out.end_object();
    }
    out.append(tensors);
    out.end_object();
    return out.written() + "\n";
}

class graph_recorder final : neuron_recording_file {
  public:
    graph_recorder() :
        neuron_recording_file("GGML_NEURON_RECORD_GRAPHS", "graphs"),
        path(neuron_variable("GGML_NEURON_RECORD_GRAPHS")) {}

    using neuron_recording_file::flush;

    ~graph_recorder() { flush(); }

    bool recording() const { return !path.empty(); }

    void add(ggml_cgraph * cgraph) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!failed && (!cgraph->uid || uids.insert(cgraph->uid).second)) {
            add(line_of(tensors_of(cgraph)));
        }
    }

    void add(const std::vector<ggml_cgraph *> & graphs) {
        std::vector<std::pair<json_line, std::vector<size_t>>> different;  // with their devices
        for (size_t device = 0; device < graphs.size(); device++) {
            json_line  tensors = tensors_of(graphs[device]);
            const auto equal   = std::find_if(different.begin(), different.end(), [&tensors](const auto & one) {
                return one.first.written() == tensors.written();
            });
            if (equal == different.end()) {
                different.push_back({ std::move(tensors), { device } });
            } else {
                equal->second.push_back(device);
            }
        }
        const std::lock_guard<std::mutex> lock(mutex);
        for (const auto & [tensors, devices] : different) {
            add(line_of(tensors, devices, graphs.size()));
        }
    }

  private:
    // locked
    void add(const std::string & line) {
        if (!failed && written.insert(std::hash<std::string>()(line)).second) {
            pending += line;
            (void) write();
        }
    }

    std::string locked() const override { return path; }

    // locked. Appends pending lines to the file, behind other processes' lines. Returns false while another process is
    // writing.
    bool write() override {
        if (pending.empty() || failed) {
            pending.clear();
            return true;
        }
        const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
        if (fd < 0) {
            fail(path + " can't be written: " + strerror(errno));
            return true;
        }
        const bool mine = flock(fd, LOCK_EX | LOCK_NB) == 0;
        if (mine || errno != EWOULDBLOCK) {
            const std::string message = mine ? append(fd) : path + ": " + strerror(errno);
            if (!message.empty()) {
                fail(message);
            }
            pending.clear();
        }
        close(fd);  // this also releases the lock
        return mine || failed;
    }

    // locked. Returns "", or why nothing can be written.
    std::string append(int fd) {
        struct stat info;
        if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
            return path + " is not a regular file";
        }
        char head[64] = "";
        if (info.st_size &&
            (pread(fd, head, strlen(BEGINNING), 0) != (ssize_t) strlen(BEGINNING) || strcmp(head, BEGINNING) != 0)) {
            return path + " exists and is not a recording of graphs";
        }
        const std::string text = (info.st_size ? "" : first_line()) + pending;
        for (size_t done = 0; done < text.size();) {
            const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
            if (n >= 0) {
                done += (size_t) n;
            } else if (errno != EINTR) {
                const int         error  = errno;
                const std::string reason = path + " can't be written: " + strerror(error);
                return ftruncate(fd, info.st_size) == 0 ? reason : reason + ", and ends within a graph";
            }
        }
        return "";
    }

    const std::string            path;
    std::string                  pending;
    std::unordered_set<uint64_t> uids;     // of graphs so far
    std::unordered_set<size_t>   written;  // hashes of lines
};

graph_recorder & the_graph_recorder() {
    static graph_recorder instance;
    return instance;
}

}  // namespace

bool neuron_recording_graphs() {
    static const bool recording = the_graph_recorder().recording();
    return recording;
}

void neuron_record_graph(ggml_cgraph * cgraph) {
    const bool computes = std::any_of(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, neuron_is_work);
    if (computes && !neuron_is_watched(cgraph)) {
        the_graph_recorder().add(cgraph);
    }
}

void neuron_record_split_graphs(const std::vector<ggml_cgraph *> & graphs) {
    the_graph_recorder().add(graphs);
}

void neuron_record_graphs_flush() {
    if (neuron_recording_graphs()) {
        the_graph_recorder().flush();
    }
}
