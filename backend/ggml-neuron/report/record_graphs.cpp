#include "report/record_graphs.h"

#include "../../graph/graph_writer.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "report/environment.h"
#include "report/log.h"
#include "select/group_key.h"
#include "select/kernel_store.h"
#include "select/sampler_probe.h"
#include "select/tensors.h"
#include "targets.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

// The beginning of each recording; the backend appends to no other file.
constexpr const char * BEGINNING = "{\"format\":\"neuron-kernelgen graphs\"";

// How often a process tries to lock the file at its end, and the pause between two attempts. Any process can keep the
// lock forever.
constexpr int                       LOCK_TRIES = 100;
constexpr std::chrono::milliseconds LOCK_PAUSE{ 50 };

// Returns the first line of the file. It states no model, because the backend does not have its name.
std::string first_line(const std::string & target, uint32_t lnc) {
    json_line out;
    out.begin_object();
    out.text("format", "neuron-kernelgen graphs");
    out.integer("version", GRAPH_FORMAT_VERSION);
    if (neuron_is_target(target)) {
        out.text("target", target.c_str());
        out.integer("lnc", lnc);
    }
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

// Returns the line of a graph that some of `n_devices` devices compute. Without devices, tensors are not split. `kind`
// marks a graph that is a part of a call: "probe" or "piece".
std::string line_of(const json_line &           tensors,
                    const char *                kind      = nullptr,
                    const std::vector<size_t> & devices   = {},
                    size_t                      n_devices = 1) {
    json_line out;
    out.begin_object();
    out.begin_object("sizes");
    out.end_object();
    out.begin_object("context");
    if (kind) {
        out.boolean(kind, true);
    }
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

// Returns the line of a graph of one node, which needs not be in a graph.
std::string line_of_node(const ggml_tensor * op, const char * kind) {
    ggml_tensor copy = *op;
    copy.flags |= GGML_TENSOR_FLAG_COMPUTE;
    std::replace(copy.src, copy.src + GGML_MAX_SRC, const_cast<ggml_tensor *>(op), &copy);
    ggml_tensor * node  = &copy;
    ggml_cgraph   graph = {};
    graph.n_nodes       = 1;
    graph.nodes         = &node;
    return line_of(tensors_of(&graph), kind);
}

class graph_recorder {
  public:
    std::string target;  // of the machine
    uint32_t    lnc = 0;

    ~graph_recorder() { flush(); }

    bool recording() const { return !path.empty(); }

    // Writes all pending lines; waits for other processes if necessary.
    void flush() {
        for (int i = 0; i < LOCK_TRIES; i++) {
            {
                const std::lock_guard<std::mutex> lock(mutex);
                if (write()) {
                    return;
                }
            }
            std::this_thread::sleep_for(LOCK_PAUSE);
        }
        const std::lock_guard<std::mutex> lock(mutex);
        fail("another process keeps " + path + " locked, so the last graphs are not in it");
    }

    void add_probe(const ggml_tensor * op, int64_t n) {
        const std::lock_guard<std::mutex> lock(mutex);
        probes.push_back({ std::make_unique<neuron_probe_node>(op, n, n), n });
    }

    void add(ggml_cgraph * cgraph) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (failed || (cgraph->uid && !uids.insert(cgraph->uid).second)) {
            return;
        }
        add(line_of(tensors_of(cgraph), neuron_is_watched(cgraph) ? "piece" : nullptr));
        answer_probes(cgraph);
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
            add(line_of(tensors, nullptr, devices, graphs.size()));
        }
    }

  private:
    // A node of llama.cpp's probe of a sampler, and its number of candidates.
    struct probe {
        std::unique_ptr<neuron_probe_node> node;
        int64_t                            n;
    };

    // locked
    void add(const std::string & line) {
        if (!failed && written.insert(std::hash<std::string>()(line)).second) {
            pending += line;
            (void) write();
        }
    }

    // locked. Writes the nodes of llama.cpp's probe with the fewest candidates of a graph: some are in no call, and
    // without their kernels llama.cpp does not sample on the device.
    void answer_probes(const ggml_cgraph * cgraph) {
        int64_t fewest = 0;
        for (int i = 0; i < cgraph->n_nodes; i++) {
            const ggml_tensor * node = cgraph->nodes[i];
            if (neuron_has_candidates(node) && (!fewest || node->ne[0] < fewest)) {
                fewest = node->ne[0];
            }
        }
        for (size_t i = 0; fewest && i < probes.size(); i++) {
            const neuron_probe_node resized(&probes[i].node->node, probes[i].n, fewest);
            add(line_of_node(&resized.node, "probe"));
        }
    }

    // locked. Ends the recording, and reports why.
    void fail(const std::string & message) {
        failed = true;
        NEURON_ERROR("GGML_NEURON_RECORD: %s: recording is off\n", message.c_str());
    }

    // locked. Appends pending lines to the file, behind other processes' lines. Returns false while another process is
    // writing.
    bool write() {
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
        const std::string text = (info.st_size ? "" : first_line(target, lnc)) + pending;
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

    const std::string            path = neuron_variable("GGML_NEURON_RECORD");
    std::mutex                   mutex;
    bool                         failed = false;
    std::string                  pending;
    std::vector<probe>           probes;
    std::unordered_set<uint64_t> uids;     // of graphs so far
    std::unordered_set<size_t>   written;  // hashes of lines
};

graph_recorder & the_graph_recorder() {
    static graph_recorder instance;
    return instance;
}

}  // namespace

bool neuron_recording() {
    static const bool recording = the_graph_recorder().recording();
    return recording;
}

void neuron_record_target(const std::string & target, uint32_t lnc) {
    the_graph_recorder().target = target;
    the_graph_recorder().lnc    = lnc;
}

void neuron_record_probe(const ggml_tensor * op) {
    if (const int64_t n = neuron_recording() ? neuron_probed_candidates(op) : 0) {
        the_graph_recorder().add_probe(op, n);
    }
}

std::string neuron_node_line(const ggml_tensor * op) {
    return line_of_node(op, nullptr);
}

void neuron_record_graph(ggml_cgraph * cgraph) {
    if (neuron_recording() && std::any_of(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, neuron_is_work)) {
        the_graph_recorder().add(cgraph);
    }
}

void neuron_record_split_graphs(const std::vector<ggml_cgraph *> & graphs) {
    the_graph_recorder().add(graphs);
}

void neuron_record_flush() {
    the_graph_recorder().flush();
}
