#include "record.h"

#include "../bundle/src/ascii.h"
#include "../bundle/src/hash.h"
#include "../bundle/src/key.h"
#include "kernels.h"
#include "log.h"
#include "targets.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
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
std::string tensor_text(const ggml_tensor * t) {
    const int64_t block = ggml_blck_size(t->type);
    const size_t  unit  = ggml_type_size(t->type);
    size_t        nb[GGML_MAX_DIMS];
    nb[0]        = t->ne[0] > block ? t->nb[0] : unit;
    bool   dense = nb[0] == unit;
    size_t next  = unit * (size_t) (t->ne[0] / block);
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        const size_t after = i == 1 ? nb[0] * (size_t) (t->ne[0] / block) : nb[i - 1] * (size_t) t->ne[i - 1];
        nb[i]              = t->ne[i] > 1 ? t->nb[i] : after;
        dense              = dense && nb[i] == next;
        next *= (size_t) t->ne[i];
    }
    char text[256];
    snprintf(text, sizeof(text), "(%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ")/%s", t->ne[0], t->ne[1], t->ne[2],
             t->ne[3], ggml_type_name(t->type));
    std::string result = text;
    if (!dense) {
        snprintf(text, sizeof(text), "/(%zu,%zu,%zu,%zu)", nb[0], nb[1], nb[2], nb[3]);
        result += text;
    }
    return result;
}

bool is_dense(const ggml_tensor * t) {
    return tensor_text(t).find("/(") == std::string::npos;
}

// Returns the shortest decimal number that is this binary32, as YAML writes it.
std::string float_text(float value) {
    if (std::isinf(value)) {
        return value > 0 ? ".inf" : "-.inf";
    }
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, (double) value);
        if (strtof(text, nullptr) == value) {
            break;
        }
    }
    // readers of YAML 1.1 take 1e-05 for a text
    std::string result = text;
    if (result.find('.') == std::string::npos) {
        const size_t e = result.find('e');
        result.insert(e == std::string::npos ? result.size() : e, ".0");
    }
    return result;
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
        float value;
        memcpy(&value, &bits, sizeof(value));
        add(p.name, p.kind == neuron_param::FLOAT  ? float_text(value)
                    : p.kind == neuron_param::BOOL ? (bits ? "true" : "false")
                                                   : std::to_string(bits));
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

struct entry {
    std::string  text;     // "{op: add, inputs: [...], output: ...}"
    const char * reason;   // why no kernel can be built; NULL when one can
    uint64_t     asked;    // how often, by this process
    uint64_t     written;  // how many of these are in the file
};

entry make_entry(const ggml_tensor * op) {
    const std::string name   = nk::lower(ggml_op_desc(op));
    const neuron_op * known  = find_op(name);
    const int         alias  = neuron_alias_of(op);
    const char *      reason = why_not(op, known, alias);

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
    return { text + "}", reason, 0, 0 };
}

// Returns a number that tells nodes apart as their entries do.
uint64_t fingerprint(const ggml_tensor * op) {
    nk::word_hash h;
    const auto    add_tensor = [&h](const ggml_tensor * t) {
        h.add((uint64_t) t->type);
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
    uint64_t    count     = 0;
};

constexpr const char * ENTRY   = "  - {op: ";
constexpr const char * COMMENT = "  # - {op: ";
constexpr const char * COUNT   = "  # asked for ";

line parse(const std::string & text) {
    line l{ text, false, false, 0 };
    l.buildable      = text.rfind(ENTRY, 0) == 0;
    const size_t end = text.rfind(COUNT);
    if ((l.buildable || text.rfind(COMMENT, 0) == 0) && end != std::string::npos) {
        const size_t start = text.find('{');
        l.is_entry         = true;
        l.count            = strtoull(text.c_str() + end + strlen(COUNT), nullptr, 10);
        l.text             = text.substr(start, end - start);
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

struct recorder {
    std::mutex                            mutex;
    std::string                           path;
    std::string                           target = "trn1";
    std::unordered_map<uint64_t, entry>   entries;
    bool                                  dirty  = false;
    bool                                  failed = false;
    std::chrono::steady_clock::time_point last_flush{};

    recorder() {
        const char * value = getenv("GGML_NEURON_RECORD");
        path               = value ? value : "";
    }

    ~recorder() { flush(); }

    void note(const ggml_tensor * op) {
        const uint64_t              hash = fingerprint(op);
        std::lock_guard<std::mutex> lock(mutex);
        auto                        found = entries.find(hash);
        const bool                  fresh = found == entries.end();
        if (fresh) {
            found = entries.emplace(hash, make_entry(op)).first;
        }
        if (fresh || neuron_log_repeats()) {
            const entry & e = found->second;
            NEURON_LOG("no kernel for %s%s%s%s\n", e.text.c_str(), e.reason ? " (" : "", e.reason ? e.reason : "",
                       e.reason ? ")" : "");
        }
        found->second.asked++;
        dirty          = true;
        const auto now = std::chrono::steady_clock::now();
        if (now - last_flush > std::chrono::seconds(1)) {
            flush_locked();
            last_flush = std::chrono::steady_clock::now();
        }
    }

    void flush() {
        std::lock_guard<std::mutex> lock(mutex);
        flush_locked();
    }

    void flush_locked() {
        if (path.empty() || !dirty || failed) {
            return;
        }
        std::string message;
        if (!write(message)) {
            failed = true;
            NEURON_ERROR("GGML_NEURON_RECORD: %s: recording is off\n", message.c_str());
        }
        dirty = false;
    }

    // Merges what this process noted into the file, which other processes do as well.
    bool write(std::string & message) {
        namespace fs    = std::filesystem;
        // The folder is locked, for the file itself is replaced.
        fs::path folder = fs::path(path).parent_path();
        if (folder.empty()) {
            folder = ".";
        }
        const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0 || flock(fd, LOCK_EX) != 0) {
            message = folder.string() + ": " + strerror(errno);
            if (fd >= 0) {
                close(fd);
            }
            return false;
        }
        const bool written = merge(message);
        close(fd);  // and with it the lock
        return written;
    }

    bool merge(std::string & message) {
        std::vector<line>             lines;
        std::map<std::string, size_t> known;
        bool                          has_list = false;
        std::ifstream                 old(path);
        for (std::string text; std::getline(old, text);) {
            lines.push_back(parse(text));
            has_list = has_list || text.rfind("kernels:", 0) == 0;
            if (lines.back().is_entry) {
                known[lines.back().text] = lines.size() - 1;
            }
        }
        old.close();
        if (lines.empty()) {
            for (const char * text :
                 { "# Recorded by ggml-neuron (GGML_NEURON_RECORD): ops that llama.cpp asked for and that no",
                   "# bundle had a kernel for. Entries that begin with '#' can't be built.", "format: 1" }) {
                lines.push_back({ text, false, false, 0 });
            }
            lines.push_back({ "name: " + manifest_name(path), false, false, 0 });
            lines.push_back({ "targets: [" + target + "]", false, false, 0 });
            lines.push_back({ "kernels:", false, false, 0 });
        } else if (!has_list) {
            message = path + " exists and is no manifest with a list of kernels";
            return false;
        }

        std::map<std::string, entry *> fresh;  // sorted, so that equal runs give equal files
        bool                           any = false;
        for (auto & item : entries) {
            entry &    e     = item.second;
            const auto found = known.find(e.text);
            if (found != known.end()) {
                lines[found->second].count += e.asked - e.written;
            } else {
                fresh[e.text] = &e;
            }
        }
        for (const auto & item : fresh) {
            lines.push_back(
                { item.first, true, item.second->reason == nullptr, item.second->asked - item.second->written });
        }
        for (const line & l : lines) {
            any = any || (l.is_entry && l.buildable);
        }
        if (!any) {
            return true;  // a manifest without kernels is none
        }

        const std::string temporary = path + "." + std::to_string(getpid()) + ".tmp";
        std::ofstream     out(temporary);
        for (const line & l : lines) {
            if (l.is_entry) {
                out << (l.buildable ? "  - " : "  # - ") << l.text << COUNT << l.count
                    << (l.count == 1 ? " time\n" : " times\n");
            } else {
                out << l.text << "\n";
            }
        }
        out.close();
        if (!out || rename(temporary.c_str(), path.c_str()) != 0) {
            message = path + " can't be written: " + strerror(errno);
            unlink(temporary.c_str());
            return false;
        }
        for (auto & item : entries) {
            item.second.written = item.second.asked;
        }
        return true;
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

void neuron_record_target(const std::string & target) {
    if (neuron_is_target(target)) {
        the_recorder().target = target;
    }
}

void neuron_record_flush() {
    the_recorder().flush();
}
