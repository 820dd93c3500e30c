#include "report/record_ops.h"

#include "../../bundle/src/ascii.h"
#include "report/log.h"
#include "report/manifest_text.h"
#include "report/recording_file.h"
#include "select/numbers.h"
#include "select/sampler_probe.h"
#include "targets.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

// How often a program requested a kernel, and how often the CPU computed a node that needs it.
struct counts {
    uint64_t asked    = 0;
    uint64_t executed = 0;
};

// Notes about all nodes with the same entry.
struct noted_entry {
    neuron_manifest_text               manifest_text;
    counts                             noted;    // by this process
    counts                             written;  // of these, the counts in the file
    // The node, if it belongs to llama.cpp's probe before it samples on a device. Such a node is never computed; nodes
    // with other numbers of candidates are.
    std::unique_ptr<neuron_probe_node> probe;
    int64_t                            probed = 0;  // its candidates
};

// A node as recorded: with any numbers, or with its own.
struct recorded_node {
    ggml_tensor node;

    recorded_node(const ggml_tensor * op, bool any_numbers) : node(*op) {
        if (any_numbers && is_open(op)) {
            const neuron_params params = neuron_open_params_of(op);
            memcpy(node.op_params, params.data(), sizeof(node.op_params));
        }
    }

    uint64_t fingerprint() const { return neuron_fingerprint(&node); }

    // A mask has an infinite number, which no user chooses.
    static bool is_open(const ggml_tensor * op) {
        std::vector<float> numbers;
        neuron_add_numbers(op, numbers);
        return !numbers.empty() &&
               std::all_of(numbers.begin(), numbers.end(), [](float number) { return std::isfinite(number); });
    }
};

std::string with_reason(const neuron_manifest_text & e) {
    return e.text + (e.reason ? std::string(" (") + e.reason + ")" : "");
}

// A line of the file: an entry with its counts, or other text, which is kept unchanged.
struct line {
    std::string text;
    bool        is_entry  = false;
    bool        buildable = false;
    counts      count;
    bool        executions = false;  // whether it has a count of executions, which older files lack
    bool        dropped    = false;  // another entry replaces it

    line(std::string text = "") : text(std::move(text)) {}
};

constexpr const char * ENTRY   = "  - {op: ";
constexpr const char * COMMENT = "  # - {op: ";
constexpr const char * COUNT   = "  # asked for ";
constexpr const char * RAN     = ", executed ";

// Returns the number behind a text's last `label`, or 0. Sets `there` to whether the text has the label.
uint64_t number_after(const std::string & text, const char * label, bool & there) {
    const size_t at = text.rfind(label);
    there           = at != std::string::npos;
    return there ? strtoull(text.c_str() + at + strlen(label), nullptr, 10) : 0;
}

// Returns "1 time" or "2 times".
std::string times(uint64_t n) {
    return std::to_string(n) + (n == 1 ? " time" : " times");
}

line parse(const std::string & text) {
    line l(text);
    l.buildable      = text.rfind(ENTRY, 0) == 0;
    const size_t end = text.rfind(COUNT);
    if ((l.buildable || text.rfind(COMMENT, 0) == 0) && end != std::string::npos) {
        const size_t      start   = text.find('{');
        const std::string comment = text.substr(end);
        bool              counted;
        l.is_entry       = true;
        l.count.asked    = number_after(comment, COUNT, counted);
        l.count.executed = number_after(comment, RAN, l.executions);
        l.text           = text.substr(start, end - start);
    }
    return l;
}

bool is_letter(char c) {
    return c >= 'a' && c <= 'z';
}

// Returns a manifest's name: its file's name, changed to allowed characters.
std::string manifest_name(const std::string & path) {
    std::string name = nk::lower(std::filesystem::path(path).stem().string().substr(0, 100));
    for (char & c : name) {
        c = is_letter(c) || (c >= '0' && c <= '9') ? c : '_';
    }
    return name.empty() || !is_letter(name[0]) ? "recorded" : name;
}

// Returns the lines of an existing file, or none.
std::vector<line> read_lines(const std::string & path) {
    std::vector<line> lines;
    std::ifstream     file(path);
    for (std::string text; std::getline(file, text);) {
        lines.push_back(parse(text));
    }
    return lines;
}

// Returns the lines of a new file before its entries.
std::vector<line> first_lines(const std::string & path, const std::string & target, uint32_t lnc) {
    std::vector<line> lines = {
        { "# Recorded by ggml-neuron (GGML_NEURON_RECORD): ops that llama.cpp asked for and that no" },
        { "# bundle had a kernel for. Entries that begin with '#' can't be built." },
        { "format: 1" },
        { "name: \"" + manifest_name(path) + "\"" },  // quoted: YAML reads null and true as other values
        { "targets: [" + target + "]" },
    };
    if (lnc == 1 && neuron_default_lnc(target) != 1) {
        lines.push_back({ "compiler: {lnc: 1}" });
    }
    lines.push_back({ "kernels:" });
    return lines;
}

// Adds the notes to the lines: to the counts of existing entries, and as new entries at the end. An op that was written
// as a comment, and has an emitter now, becomes an entry.
void add_entries(const std::unordered_map<uint64_t, noted_entry> &      entries,
                 const std::function<bool(const noted_entry & entry)> & is_written,
                 std::vector<line> &                                    lines) {
    std::map<std::string, line *> known;
    for (line & l : lines) {
        if (l.is_entry) {
            known[l.text] = &l;
        }
    }
    std::map<std::string, line> fresh;  // sorted, so that equal runs give equal files
    for (const auto & item : entries) {
        const noted_entry &          recorded = item.second;
        const neuron_manifest_text & e        = recorded.manifest_text;
        counts                       count    = { recorded.noted.asked - recorded.written.asked,
                                                  recorded.noted.executed - recorded.written.executed };
        if ((!count.asked && !count.executed) || !is_written(recorded)) {
            continue;
        }
        const auto stale = known.find(e.without_emitter);
        if (stale != known.end() && e.without_emitter != e.text && !stale->second->buildable &&
            !stale->second->dropped) {
            count.asked += stale->second->count.asked;
            count.executed += stale->second->count.executed;
            stale->second->dropped = true;
        }
        const auto found = known.find(e.text);
        line &     l     = found != known.end() ? *found->second : fresh[e.text];
        l.text           = e.text;
        l.is_entry       = true;
        l.buildable      = l.buildable || !e.reason;
        l.executions     = true;
        l.count.asked += count.asked;
        l.count.executed += count.executed;
    }
    for (const auto & item : fresh) {
        lines.push_back(item.second);
    }
}

std::string text_of(const std::vector<line> & lines) {
    std::string text;
    for (const line & l : lines) {
        if (l.is_entry && !l.dropped) {
            text += (l.buildable ? "  - " : "  # - ") + l.text + COUNT + times(l.count.asked) +
                    (l.executions ? RAN + times(l.count.executed) : "") + "\n";
        } else if (!l.is_entry) {
            text += l.text + "\n";
        }
    }
    return text;
}

// Replaces the file at a path by one with this text. Returns 0, or an errno.
int replace_file(const std::string & path, const std::string & text) {
    const std::string temporary = path + "." + std::to_string(getpid()) + ".tmp";
    unlink(temporary.c_str());  // left by a process with the same number; never write to an existing file
    const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) {
        return errno;
    }
    int error = 0;
    for (size_t done = 0; done < text.size() && !error;) {
        const ssize_t n = write(fd, text.data() + done, text.size() - done);
        if (n >= 0) {
            done += (size_t) n;
        } else if (errno != EINTR) {
            error = errno;
        }
    }
    if (close(fd) != 0 && !error) {
        error = errno;
    }
    if (!error && rename(temporary.c_str(), path.c_str()) != 0) {
        error = errno;
    }
    if (error) {
        unlink(temporary.c_str());
    }
    return error;
}

// Locks a folder against other recording processes. It does not wait, because any process can keep the lock forever.
class folder_lock {
  public:
    explicit folder_lock(const std::string & folder) : fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
        error = fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0 ? errno : 0;
    }

    ~folder_lock() {
        if (fd >= 0) {
            close(fd);  // this also releases the lock
        }
    }

    folder_lock(const folder_lock &) = delete;

    int error;  // 0: locked; EWOULDBLOCK: another process holds the lock

  private:
    int fd;
};

struct recorder final : neuron_recording_file {
    std::string                               path;
    std::string                               target = "trn1";
    uint32_t                                  lnc    = 0;  // 0: the target's default
    std::unordered_map<uint64_t, noted_entry> entries;
    bool                                      dirty   = false;
    bool                                      samples = false;  // whether llama.cpp probed a sampler
    std::set<int64_t>                         candidates;       // the numbers that samplers choose from
    std::chrono::steady_clock::time_point     last_flush{};

    recorder() : neuron_recording_file("GGML_NEURON_RECORD", "ops that were asked for") {
        const char * value = getenv("GGML_NEURON_RECORD");
        path               = value ? value : "";
    }

    ~recorder() { flush(); }

    void note_executed(const ggml_tensor * op) {
        std::lock_guard<std::mutex> lock(mutex);
        for (const bool any_numbers : { samples, false }) {  // noted since the probe of a sampler, or before
            const auto found = entries.find(recorded_node(op, any_numbers).fingerprint());
            if (found != entries.end()) {                    // else it has a kernel, which is unusable this time
                found->second.noted.executed++;
                dirty = true;
                return;
            }
        }
    }

    void note(const ggml_tensor * op) {
        const int64_t               probed = neuron_probed_candidates(op);
        std::lock_guard<std::mutex> lock(mutex);
        samples = samples || probed;
        if (!probed && neuron_has_candidates(op)) {
            candidates.insert(op->ne[0]);
        }
        noted_entry & entry = entry_of(op);
        if (probed && !entry.probe) {
            entry.probe  = std::make_unique<neuron_probe_node>(op, probed, probed);
            entry.probed = probed;
        }
        entry.noted.asked++;
        dirty = true;
        // The caller may hold a core's mutex: entries that can't be written now are written later.
        if (std::chrono::steady_clock::now() - last_flush > std::chrono::seconds(1)) {
            (void) write();
            last_flush = std::chrono::steady_clock::now();
        }
    }

    // locked. Returns the entry of a node, and reports a new one.
    noted_entry & entry_of(const ggml_tensor * op) {
        const recorded_node recorded(op, samples);
        const uint64_t      hash  = recorded.fingerprint();
        auto                found = entries.find(hash);
        const bool          fresh = found == entries.end();
        if (fresh) {
            found                       = entries.emplace(hash, noted_entry{}).first;
            found->second.manifest_text = neuron_manifest_text_of(&recorded.node);
        }
        NEURON_DEBUG("no kernel for %s\n", with_reason(neuron_manifest_text_of(op)).c_str());
        return found->second;
    }

    // locked. Adds an entry, with the actual number of candidates, for each node of llama.cpp's probe: the node of a
    // call if there is one, and else the probe's node with the fewest candidates.
    void answer_probes() {
        std::vector<const noted_entry *> probes;
        for (const auto & item : entries) {
            if (item.second.probe && !candidates.count(item.second.probed)) {
                probes.push_back(&item.second);
            }
        }
        for (const noted_entry * probe : candidates.empty() ? decltype(probes)() : probes) {
            const auto is_there = [&](int64_t n) {
                const neuron_probe_node resized(&probe->probe->node, probe->probed, n);
                return entries.count(recorded_node(&resized.node, true).fingerprint()) > 0;
            };
            if (std::none_of(candidates.begin(), candidates.end(), is_there)) {
                const neuron_probe_node resized(&probe->probe->node, probe->probed, *candidates.begin());
                noted_entry &           entry = entry_of(&resized.node);
                entry.noted                   = { 1, 1 };  // without its kernel no call has a sampler
            }
        }
    }

    // locked. Returns whether a node belongs in the file.
    bool is_written(const noted_entry & entry) const {
        return !entry.probe || entry.noted.executed || candidates.count(entry.probed);
    }

    std::string locked() const override { return "the folder of " + path; }

    // locked. Merges this process's notes into the file, as other processes do. Returns false while another process is
    // writing.
    bool write() override {
        if (path.empty() || !dirty || failed) {
            return true;
        }
        // This locks the folder, because the file itself is replaced.
        std::string folder = std::filesystem::path(path).parent_path().string();
        folder             = folder.empty() ? "." : folder;
        const folder_lock lock(folder);
        if (lock.error == EWOULDBLOCK) {
            return false;
        }
        std::string message = lock.error ? folder + ": " + strerror(lock.error) : merge();
        if (!message.empty()) {
            fail(message);
        }
        dirty = false;
        return true;
    }

    // locked. Returns "", or why the file can't be written.
    std::string merge() {
        struct stat info;
        const bool  there = stat(path.c_str(), &info) == 0;
        if (there && !S_ISREG(info.st_mode)) {
            return path + " is not a regular file";
        }
        std::vector<line> lines   = read_lines(path);
        const auto        is_list = [](const line & l) {
            return l.text.rfind("kernels:", 0) == 0;
        };
        if (lines.empty()) {
            lines = first_lines(path, target, lnc);
        } else if (std::none_of(lines.begin(), lines.end(), is_list)) {
            return path + " exists and is not a manifest with a list of kernels";
        }
        answer_probes();
        add_entries(entries, [this](const noted_entry & entry) { return is_written(entry); }, lines);
        const auto is_kernel = [](const line & l) {
            return l.is_entry && l.buildable;
        };
        if (std::none_of(lines.begin(), lines.end(), is_kernel)) {
            return "";  // a manifest must have kernels
        }
        if (const int error = replace_file(path, text_of(lines))) {
            return path + " can't be written: " + strerror(error);
        }
        for (auto & item : entries) {
            item.second.written = is_written(item.second) ? item.second.noted : counts{};
        }
        return "";
    }
};

recorder & the_recorder() {
    static recorder instance;
    return instance;
}

}  // namespace

bool neuron_recording() {
    static const bool recording = !the_recorder().path.empty();
    return recording;
}

void neuron_note_missing(const ggml_tensor * op) {
    if (neuron_log_enabled() || neuron_recording()) {
        the_recorder().note(op);
    }
}

void neuron_note_executed(const ggml_tensor * op) {
    if (neuron_recording()) {
        the_recorder().note_executed(op);
    }
}

void neuron_record_target(const std::string & target, uint32_t lnc) {
    if (neuron_is_target(target)) {
        the_recorder().target = target;
        the_recorder().lnc    = lnc;
    }
}

void neuron_record_flush() {
    the_recorder().flush();
}
