#include "record.h"

#include "../bundle/src/ascii.h"
#include "../bundle/src/hash.h"
#include "../bundle/src/key.h"
#include "forms.h"
#include "kernels.h"
#include "log.h"
#include "recording.h"
#include "targets.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

//
// what kernelgen knows of ops: generated
//

namespace {

// A parameter of an op.
struct neuron_param {
    enum kind_t { INT, FLOAT, BOOL };

    const char * name;
    int          word;  // of op_params
    kind_t       kind;
    bool         has_default;
    int32_t      default_bits;
    int32_t      choices[8];  // allowed values; all 0 when any is
};

// ggml types by input, as bits of their numbers: a combination that emitters take.
struct neuron_types {
    uint64_t masks[GGML_MAX_SRC];
};

struct neuron_op {
    const char *         name;
    bool                 variant;   // of UNARY or GLU: word 0 of op_params tells which
    int                  n_inputs;  // that the emitter takes
    int                  required;
    int                  alias;     // the input whose memory the result shares in any case
    const neuron_param * params;
    size_t               n_params;
    const neuron_types * types;
    size_t               n_types;
};

#include "op_table.inc"

constexpr int N_PARAM_WORDS = GGML_MAX_OP_PARAMS / sizeof(int32_t);

const neuron_op * find_op(const std::string & name) {
    for (const neuron_op & op : NEURON_OPS) {
        if (name == op.name) {
            return &op;
        }
    }
    return nullptr;
}

//
// a node as an entry of a manifest
//

// Returns "(4096,512,1,1)/f32", with strides when the tensor has gaps or another order. Strides of dimensions of one
// element mean nothing and are taken as density gives them, as in a kernel's key.
std::string tensor_text(const neuron_kernels_tensor & t) {
    const ggml_type type  = neuron_plain_type(t.type);
    const int64_t   block = ggml_blck_size(type);
    const size_t    unit  = ggml_type_size(type);
    size_t          nb[GGML_MAX_DIMS];
    nb[0]        = t.ne[0] > block ? t.nb[0] : unit;
    bool   dense = nb[0] == unit;
    size_t next  = unit * (size_t) (t.ne[0] / block);
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        const size_t after = i == 1 ? nb[0] * (size_t) (t.ne[0] / block) : nb[i - 1] * (size_t) t.ne[i - 1];
        nb[i]              = t.ne[i] > 1 ? t.nb[i] : after;
        dense              = dense && nb[i] == next;
        next *= (size_t) t.ne[i];
    }
    char text[256];
    snprintf(text, sizeof(text), "(%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ")/%s", t.ne[0], t.ne[1], t.ne[2],
             t.ne[3], ggml_type_name(type));
    std::string result = text;
    if (const int32_t form = t.type >> NEURON_KERNELS_FORM_SHIFT) {
        result += std::string(":") + neuron_form_name(form);
    }
    if (!dense) {
        snprintf(text, sizeof(text), "/(%zu,%zu,%zu,%zu)", nb[0], nb[1], nb[2], nb[3]);
        result += text;
    }
    return result;
}

std::string tensor_text(const ggml_tensor * t) {
    return tensor_text(neuron_tensor_of(t));
}

bool is_dense(const ggml_tensor * t) {
    return tensor_text(t).find("/(") == std::string::npos;
}

// Returns the shortest decimal number that is this binary32, as printf("%g") writes it where the decimal point is a point:
// printf itself goes by the locale of the program.
std::string shortest_text(float value) {
    for (int digits = 1;; digits++) {
        char   text[32];
        char * end  = std::to_chars(text, text + sizeof(text), value, std::chars_format::general, digits).ptr;
        float  same = 0;
        std::from_chars(text, end, same);
        if (same == value || digits == 9) {
            return std::string(text, end);
        }
    }
}

// Returns the same as YAML writes it.
std::string float_text(float value) {
    if (std::isinf(value)) {
        return value > 0 ? ".inf" : "-.inf";
    }
    std::string result = shortest_text(value);
    // readers of YAML 1.1 take 1e-05 for a text
    if (result.find('.') == std::string::npos) {
        const size_t e = result.find('e');
        result.insert(e == std::string::npos ? result.size() : e, ".0");
    }
    return result;
}

std::string param_text(const neuron_param & p, int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return p.kind == neuron_param::FLOAT  ? float_text(value)
           : p.kind == neuron_param::BOOL ? (bits ? "true" : "false")
                                          : std::to_string(bits);
}

std::string params_text(const ggml_tensor * op, const neuron_op * known) {
    uint32_t    named = known && known->variant ? 1u : 0u;
    std::string text;
    const auto  add = [&text](const std::string & name, const std::string & value) {
        text += (text.empty() ? "" : ", ") + name + ": " + value;
    };
    for (size_t i = 0; known && i < known->n_params; i++) {
        const neuron_param & p    = known->params[i];
        const int32_t        bits = op->op_params[p.word];
        named |= 1u << p.word;
        if (p.has_default && bits == p.default_bits) {
            continue;
        }
        add(p.name, param_text(p, bits));
    }
    for (int word = 0; word < N_PARAM_WORDS; word++) {
        if (!(named & 1u << word) && op->op_params[word]) {
            add("word" + std::to_string(word), std::to_string(op->op_params[word]));
        }
    }
    return text;
}

// Returns why no kernel can be built for a node, or NULL when one can.
const char * why_not(const ggml_tensor * op, const neuron_op * known, int alias) {
    if (!known || !known->n_types) {
        return "no emitter for this op";
    }
    const int n_src = neuron_n_src(op);
    if (n_src < known->required || n_src > known->n_inputs) {
        return "no emitter for these inputs";
    }
    bool fits = false;
    for (size_t row = 0; row < known->n_types && !fits; row++) {
        fits = true;
        for (int i = 0; i < known->n_inputs && fits; i++) {
            const int bit = op->src[i] ? (int) op->src[i]->type : 63;
            fits          = (i >= n_src && i >= known->required) || (known->types[row].masks[i] >> bit & 1);
        }
    }
    if (!fits) {
        return "no emitter for these types";
    }
    for (int i = 0; i < n_src; i++) {
        if (op->src[i] && ggml_is_empty(op->src[i])) {
            return "an input without elements";
        }
    }
    for (int i = 0; i < n_src; i++) {
        const bool formed = op->src[i] && neuron_type_of(op->src[i]) != op->src[i]->type;
        const bool weight = i == 0 && (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID);
        if (formed && (!weight || neuron_type_of(op->src[i]) >> NEURON_KERNELS_FORM_SHIFT == NEURON_FORM_SCATTERED)) {
            return "a weight in a form that kernels for this op don't take";
        }
    }
    // conv_2d_dw leaves its channels together when its image has them so, without gaps
    if (alias == NEURON_KERNELS_NO_ALIAS && !is_dense(op) && op->op != GGML_OP_CONV_2D_DW) {
        return "no emitter for results with gaps";
    }
    uint32_t named = known->variant ? 1u : 0u;
    for (size_t i = 0; i < known->n_params; i++) {
        const neuron_param & p = known->params[i];
        named |= 1u << p.word;
        bool any    = true;
        bool listed = false;
        for (const int32_t choice : p.choices) {
            any    = any && choice == 0;
            listed = listed || choice == op->op_params[p.word];
        }
        if (!any && !listed) {
            return "no emitter for these parameters";
        }
        float value;
        memcpy(&value, &op->op_params[p.word], sizeof(value));
        if (p.kind == neuron_param::FLOAT && std::isnan(value)) {
            return "a parameter that is not a number";
        }
    }
    for (int word = 0; word < N_PARAM_WORDS; word++) {
        if (!(named & 1u << word) && op->op_params[word]) {
            return "no emitter for these parameters";
        }
    }
    return nullptr;
}

// How often a kernel was asked for, and how often the CPU computed a node that needs it.
struct counts {
    uint64_t asked    = 0;
    uint64_t executed = 0;
};

struct entry {
    std::string  text;             // "{op: add, inputs: [...], output: ...}"
    std::string  without_emitter;  // what it was in a file that was recorded when the op had no emitter
    const char * reason;           // why no kernel can be built; NULL when one can
    counts       noted;            // by this process
    counts       written;          // of these, what is in the file
};

// Returns a node as a manifest has it; `known` gives the parameters their names.
std::string entry_text(const ggml_tensor * op, const std::string & name, const neuron_op * known, int alias) {
    std::string text = "{op: \"" + name + "\", inputs: [";
    for (int i = 0; i < neuron_n_src(op); i++) {
        text += (i ? ", " : "") + (op->src[i] ? "\"" + tensor_text(op->src[i]) + "\"" : "null");
    }
    text += "], output: \"" + tensor_text(op) + "\"";
    const std::string params = params_text(op, known);
    if (!params.empty()) {
        text += ", params: {" + params + "}";
    }
    if (alias != NEURON_KERNELS_NO_ALIAS && !(known && known->alias == alias)) {
        text += ", alias: " + std::to_string(alias);
    }
    return text + "}";
}

entry make_entry(const ggml_tensor * op) {
    const std::string name  = nk::lower(ggml_op_desc(op));
    const neuron_op * known = find_op(name);
    const int         alias = neuron_alias_of(op);
    return {
        entry_text(op, name, known, alias), entry_text(op, name, nullptr, alias), why_not(op, known, alias), {}, {}
    };
}

std::string with_reason(const entry & e) {
    return e.text + (e.reason ? std::string(" (") + e.reason + ")" : "");
}

// Returns a number that tells nodes apart as their entries do.
uint64_t fingerprint(const ggml_tensor * op) {
    nk::word_hash h;
    const auto    add_tensor = [&h](const ggml_tensor * t) {
        h.add((uint64_t) neuron_type_of(t));
        for (int i = 0; i < GGML_MAX_DIMS; i++) {
            h.add((uint64_t) t->ne[i]);
            h.add(t->ne[i] > 1 ? t->nb[i] : 0);
        }
    };
    h.add((uint64_t) op->op);
    h.add((uint64_t) (int64_t) neuron_alias_of(op));
    for (const int32_t word : op->op_params) {
        h.add((uint32_t) word);
    }
    add_tensor(op);
    for (const ggml_tensor * src : op->src) {
        if (src) {
            add_tensor(src);
        } else {
            h.add(nk::ABSENT_WORD);
        }
    }
    return h.value();
}

//
// the manifest
//

// A line of the file: an entry with its count, or anything else, which is kept as it is.
struct line {
    std::string text;
    bool        is_entry  = false;
    bool        buildable = false;
    counts      count;
    bool        executions = false;  // whether it says how often it was executed, which older files do not
    bool        dropped    = false;  // another entry took its place

    line(std::string text = "") : text(std::move(text)) {}
};

constexpr const char * ENTRY   = "  - {op: ";
constexpr const char * COMMENT = "  # - {op: ";
constexpr const char * COUNT   = "  # asked for ";
constexpr const char * RAN     = ", executed ";

// Returns the number after a text's last `label`, or 0 and sets `there` to whether there is such a label.
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

// A manifest's name is that of its file, as far as it can be.
std::string manifest_name(const std::string & path) {
    std::string name = nk::lower(std::filesystem::path(path).stem().string().substr(0, 40));
    for (char & c : name) {
        c = is_letter(c) || (c >= '0' && c <= '9') ? c : '_';
    }
    return name.empty() || !is_letter(name[0]) ? "recorded" : name;
}

// The lines of the file that is there, none when there is none.
std::vector<line> read_lines(const std::string & path) {
    std::vector<line> lines;
    std::ifstream     file(path);
    for (std::string text; std::getline(file, text);) {
        lines.push_back(parse(text));
    }
    return lines;
}

// The lines of a new file, before its entries.
std::vector<line> first_lines(const std::string & path, const std::string & target) {
    std::vector<line> lines = {
        { "# Recorded by ggml-neuron (GGML_NEURON_RECORD): ops that llama.cpp asked for and that no" },
        { "# bundle had a kernel for. Entries that begin with '#' can't be built." },
        { "format: 1" },
        { "name: " + manifest_name(path) },
        { "targets: [" + target + "]" },
    };
    if (neuron_lnc(target) == 1 && neuron_default_lnc(target) != 1) {
        lines.push_back({ "compiler: {lnc: 1}" });
    }
    lines.push_back({ "kernels:" });
    return lines;
}

// Adds what was noted to the lines: to the counts of entries that are there, and others at the end. What has got an emitter
// since it was written as a comment becomes an entry.
void add_entries(const std::unordered_map<uint64_t, entry> & entries, std::vector<line> & lines) {
    std::map<std::string, line *> known;
    for (line & l : lines) {
        if (l.is_entry) {
            known[l.text] = &l;
        }
    }
    std::map<std::string, line> fresh;  // sorted, so that equal runs give equal files
    for (const auto & item : entries) {
        const entry & e     = item.second;
        counts        count = { e.noted.asked - e.written.asked, e.noted.executed - e.written.executed };
        if (!count.asked && !count.executed) {
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

// Puts a file with this text in the place of a path. Returns 0, or an errno.
int replace_file(const std::string & path, const std::string & text) {
    const std::string temporary = path + "." + std::to_string(getpid()) + ".tmp";
    unlink(temporary.c_str());  // of a process that had the same number; what comes there now is not written to
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

// Locks a folder among the processes that record into it. Any process can keep it locked for ever: so it is not waited for.
class folder_lock {
  public:
    explicit folder_lock(const std::string & folder) : fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
        error = fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0 ? errno : 0;
    }

    ~folder_lock() {
        if (fd >= 0) {
            close(fd);  // and with it the lock
        }
    }

    folder_lock(const folder_lock &) = delete;

    int error;  // 0: locked; EWOULDBLOCK: another process has it

  private:
    int fd;
};

struct recorder final : neuron_recording_file {
    std::string                           path;
    std::string                           target = "trn1";
    std::unordered_map<uint64_t, entry>   entries;
    bool                                  dirty = false;
    std::chrono::steady_clock::time_point last_flush{};

    recorder() : neuron_recording_file("GGML_NEURON_RECORD", "ops that were asked for") {
        const char * value = getenv("GGML_NEURON_RECORD");
        path               = value ? value : "";
    }

    ~recorder() { flush(); }

    void note_executed(const ggml_tensor * op) {
        std::lock_guard<std::mutex> lock(mutex);
        const auto                  found = entries.find(fingerprint(op));
        if (found != entries.end()) {  // else it has a kernel, which can't be used this time
            found->second.noted.executed++;
            dirty = true;
        }
    }

    void note(const ggml_tensor * op) {
        const uint64_t              hash = fingerprint(op);
        std::lock_guard<std::mutex> lock(mutex);
        auto                        found = entries.find(hash);
        const bool                  fresh = found == entries.end();
        if (fresh) {
            found = entries.emplace(hash, make_entry(op)).first;
        }
        if (fresh || neuron_log_repeats()) {
            NEURON_LOG("no kernel for %s\n", with_reason(found->second).c_str());
        }
        found->second.noted.asked++;
        dirty = true;
        // Whoever asks may hold a core's mutex: what can't be written at once is written later.
        if (std::chrono::steady_clock::now() - last_flush > std::chrono::seconds(1)) {
            (void) write();
            last_flush = std::chrono::steady_clock::now();
        }
    }

    std::string locked() const override { return "the folder of " + path; }

    // locked. Merges what this process noted into the file, which other processes do as well. Returns false when one of them
    // is at it.
    bool write() override {
        if (path.empty() || !dirty || failed) {
            return true;
        }
        // The folder is locked, for the file itself is replaced.
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
            lines = first_lines(path, target);
        } else if (std::none_of(lines.begin(), lines.end(), is_list)) {
            return path + " exists and is not a manifest with a list of kernels";
        }
        add_entries(entries, lines);
        const auto is_kernel = [](const line & l) {
            return l.is_entry && l.buildable;
        };
        if (std::none_of(lines.begin(), lines.end(), is_kernel)) {
            return "";  // a manifest without kernels is none
        }
        if (const int error = replace_file(path, text_of(lines))) {
            return path + " can't be written: " + strerror(error);
        }
        for (auto & item : entries) {
            item.second.written = item.second.noted;
        }
        return "";
    }
};

recorder & the_recorder() {
    static recorder instance;
    return instance;
}

}  // namespace

bool neuron_can_be_built(const ggml_tensor * op) {
    return why_not(op, find_op(nk::lower(ggml_op_desc(op))), neuron_alias_of(op)) == nullptr;
}

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

std::string neuron_manifest_line(const ggml_tensor * op, const char ** reason) {
    const entry e = make_entry(op);
    *reason       = e.reason;
    return "- " + e.text;
}

std::string neuron_tensor_text(const neuron_kernels_tensor & t) {
    return t.type == NEURON_KERNELS_ABSENT ? "absent" : tensor_text(t);
}

void neuron_add_param_differences(const ggml_tensor * op, const int32_t * held, std::vector<std::string> & found) {
    const neuron_op * known = find_op(nk::lower(ggml_op_desc(op)));
    uint32_t          named = known && known->variant ? 1u : 0u;
    const auto        add   = [&](const std::string & name, const std::string & have, const std::string & want) {
        found.push_back(name + " is " + have + ", not " + want);
    };
    for (size_t i = 0; known && i < known->n_params; i++) {
        const neuron_param & p = known->params[i];
        named |= 1u << p.word;
        if (held[p.word] != op->op_params[p.word]) {
            add(p.name, param_text(p, held[p.word]), param_text(p, op->op_params[p.word]));
        }
    }
    for (int word = 0; word < N_PARAM_WORDS; word++) {
        if (!(named & 1u << word) && held[word] != op->op_params[word]) {
            add("word" + std::to_string(word), std::to_string(held[word]), std::to_string(op->op_params[word]));
        }
    }
}

std::string neuron_describe(const ggml_tensor * op) {
    const std::string name = nk::lower(ggml_op_desc(op));
    std::string       text = name;
    for (int i = 0; i < neuron_n_src(op); i++) {
        text += (i ? ", " : " of ") + (op->src[i] ? tensor_text(op->src[i]) : "none");
    }
    const char * reason = why_not(op, find_op(name), neuron_alias_of(op));
    return text + (reason ? std::string(" (") + reason + ")" : "");
}

uint64_t neuron_fingerprint(const ggml_tensor * op) {
    return fingerprint(op);
}

void neuron_record_target(const std::string & target) {
    if (neuron_is_target(target)) {
        the_recorder().target = target;
    }
}

void neuron_record_flush() {
    the_recorder().flush();
}
