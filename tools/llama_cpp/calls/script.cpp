#include "script.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>

using std::string;

void script::run() {
    std::ifstream file(path);
    if (!file) {
        fail(path + ": can't be read");
    }
    string text;
    for (int number_of_line = 1; std::getline(file, text); number_of_line++) {
        try {
            words line(text);
            do_line(line);
        } catch (const std::exception & error) {
            fail(path + ":" + std::to_string(number_of_line) + ": " + text + ": " + error.what());
        }
    }
}

pair & script::current() {
    const auto found = contexts.find(name);
    if (found == contexts.end()) {
        fail("no line before makes the context " + name);
    }
    return found->second;
}

static string read_word(std::istringstream & line) {
    string word;
    if (!(line >> word)) {
        fail("something is missing");
    }
    return word;
}

template <size_t N> static std::array<int, N> read_numbers(std::istringstream & line) {
    std::array<int, N> numbers;
    for (int & number : numbers) {
        number = atoi(read_word(line).c_str());
    }
    return numbers;
}

static part read_part(const string & text) {
    part p;
    char outputs[8];
    if (sscanf(text.c_str(), "%d:%d:%d:%7s", &p.seq, &p.pos, &p.n, outputs) != 4 || p.n < 1) {
        fail(text + " is not SEQ:POS:N:OUTPUTS");
    }
    p.outputs = outputs;
    return p;
}

void script::do_line(words & line) {
    const string verb = read_word(line);
    if (verb == "context") {
        name = read_word(line);
        make_context(line);
    } else if (verb == "use") {
        name = read_word(line);
        current();
    } else if (verb == "end") {
        contexts.erase(read_word(line));
    } else if (verb == "decode") {
        std::vector<part> parts;
        for (string word; line >> word;) {
            parts.push_back(read_part(word));
        }
        decode(parts);
    } else if (verb == "greedy") {
        const auto [seq, pos, n] = read_numbers<3>(line);
        for (int i = 0; i < n; i++) {
            if (current().likeliest < 0) {
                fail("no call has logits");
            }
            decode(
                {
                    part{ seq, pos + i, 1, "last" }
            },
                current().likeliest);
        }
    } else if (verb == "fill") {
        const auto [seq, n] = read_numbers<2>(line);
        fill(seq, n);
    } else if (verb == "forget") {
        const auto [seq, from, to] = read_numbers<3>(line);
        for (llama_context * context : current().both()) {
            if (!llama_memory_seq_rm(llama_get_memory(context), seq, from, to)) {
                fail("it can't be removed");
            }
        }
    } else if (verb == "shift") {
        const auto [seq, from, to, by] = read_numbers<4>(line);
        for (llama_context * context : current().both()) {
            if (!llama_memory_can_shift(llama_get_memory(context))) {
                fail("it can't be shifted");
            }
            llama_memory_seq_add(llama_get_memory(context), seq, from, to, by);
        }
    } else if (verb == "copy") {
        const auto [seq, to, from, end] = read_numbers<4>(line);
        for (llama_context * context : current().both()) {
            llama_memory_seq_cp(llama_get_memory(context), seq, to, from, end);
        }
    } else if (verb == "adapters") {
        set_adapters(line);
    } else if (verb == "save" || verb == "restore") {
        keep_state(read_numbers<1>(line)[0], verb == "restore");
    } else if (verb == "logits") {
        logits.open(read_word(line), std::ios::binary);
        if (string file; line >> file) {
            logits_cpu.open(file, std::ios::binary);
        }
    } else {
        fail("this is not a verb");
    }
}

namespace {

struct context_keys {
    llama_context_params params         = llama_context_default_params();
    bool                 cpu            = true;
    bool                 cpu_flash_attn = true;
    uint32_t             cpu_n_ubatch   = 0;
};

using set_key = void (*)(context_keys &, int);

bool read_node(ggml_tensor * /* node */, bool /* ask */, void * /* user_data */) {
    return true;
}

llama_flash_attn_type flash_attn(bool enabled) {
    return enabled ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
}

const std::map<string, set_key> KEYS = {
    { "n_ctx",          [](context_keys & k, int n) { k.params.n_ctx                = (uint32_t) n; }          },
    { "n_batch",        [](context_keys & k, int n) { k.params.n_batch            = (uint32_t) n; }            },
    { "n_ubatch",       [](context_keys & k, int n) { k.params.n_ubatch          = (uint32_t) n; }             },
    { "n_seq_max",      [](context_keys & k, int n) { k.params.n_seq_max        = (uint32_t) n; }              },
    { "kv_unified",     [](context_keys & k, int n) { k.params.kv_unified      = n != 0; }                     },
    { "swa_full",       [](context_keys & k, int n) { k.params.swa_full          = n != 0; }                   },
    { "type_k",         [](context_keys & k, int n) { k.params.type_k              = (enum ggml_type) n; }     },
    { "type_v",         [](context_keys & k, int n) { k.params.type_v              = (enum ggml_type) n; }     },
    { "embeddings",     [](context_keys & k, int n) { k.params.embeddings      = n != 0; }                     },
    { "watched",        [](context_keys & k, int n) { k.params.cb_eval            = n ? read_node : nullptr; } },
    { "flash_attn",     [](context_keys & k, int n) { k.params.flash_attn_type = flash_attn(n != 0); }         },
    { "cpu",            [](context_keys & k, int n) { k.cpu                           = n != 0; }              },
    { "cpu_flash_attn", [](context_keys & k, int n) { k.cpu_flash_attn     = n != 0; }                         },
    { "cpu_n_ubatch",   [](context_keys & k, int n) { k.cpu_n_ubatch         = (uint32_t) n; }                 },
    { "causal",
     [](context_keys & k,                    int n) {
          k.params.attention_type = n ? LLAMA_ATTENTION_TYPE_CAUSAL : LLAMA_ATTENTION_TYPE_NON_CAUSAL;
      }                                                                               },
};

}  // namespace

void script::make_context(words & line) {
    context_keys           keys;
    llama_context_params & params = keys.params;
    params.n_threads              = 1;
    params.n_threads_batch        = 1;
    params.no_perf                = true;
    params.swa_full               = false;  // as in llama.cpp's programs and in kernelgen model
    params.flash_attn_type        = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    for (string word; line >> word;) {
        const size_t equals = word.find('=');
        const auto   found  = KEYS.find(word.substr(0, equals));
        if (found == KEYS.end() || equals == string::npos) {
            fail(word + " is not a key of a context and its number");
        }
        found->second(keys, atoi(word.c_str() + equals + 1));
    }
    pair made;
    made.device.reset(llama_init_from_model(all.device.get(), params));
    made.params     = params;
    params.n_ubatch = made.n_ubatch = keys.cpu_n_ubatch ? keys.cpu_n_ubatch : params.n_ubatch;
    params.n_batch                  = std::max(params.n_batch, params.n_ubatch);
    if (keys.cpu) {
        params.cb_eval         = nullptr;
        params.flash_attn_type = flash_attn(keys.cpu_flash_attn);
        made.cpu.reset(llama_init_from_model(all.cpu.get(), params));
    }
    if (!made.device || (keys.cpu && !made.cpu)) {
        fail("there is no context");
    }
    if (params.embeddings) {
        const bool ranks = llama_pooling_type(made.device.get()) == LLAMA_POOLING_TYPE_RANK;
        made.n_embd =
            ranks ? llama_model_n_cls_out(all.device.get()) : (size_t) llama_model_n_embd_out(all.device.get());
    }
    contexts[name] = std::move(made);
}

// Each of the two models loads an adapter once, and frees it.
void script::set_adapters(words & line) {
    std::vector<string> files;
    std::vector<float>  scales;
    for (string word; line >> word;) {
        const size_t colon = word.rfind(':');
        files.push_back(word.substr(0, colon));
        scales.push_back(strtof(word.substr(colon + 1).c_str(), nullptr));
    }
    for (llama_context * context : current().both()) {
        llama_model *                     model = (context == current().device.get() ? all.device : all.cpu).get();
        std::vector<llama_adapter_lora *> loaded;
        for (const string & file : files) {
            llama_adapter_lora *& adapter = adapters[{ model, file }];
            adapter                       = adapter ? adapter : llama_adapter_lora_init(model, file.c_str());
            if (!adapter) {
                fail(file + " can't be loaded");
            }
            loaded.push_back(adapter);
        }
        if (llama_set_adapters_lora(context, loaded.data(), loaded.size(), scales.data()) != 0) {
            fail("the context can't have them");
        }
    }
}

// Returns the state of a sequence, or of the whole context if `seq` is -1.
static std::vector<uint8_t> state_of(llama_context * context, llama_seq_id seq) {
    std::vector<uint8_t> state(seq < 0 ? llama_state_get_size(context) : llama_state_seq_get_size(context, seq));
    const size_t         size = seq < 0 ? llama_state_get_data(context, state.data(), state.size())
                                        : llama_state_seq_get_data(context, state.data(), state.size(), seq);
    if (size != state.size()) {
        fail("the state has another size");
    }
    return state;
}

static void restore_state(llama_context * context, llama_seq_id seq, const std::vector<uint8_t> & state) {
    llama_memory_seq_rm(llama_get_memory(context), seq, -1, -1);
    const size_t size = seq < 0 ? llama_state_set_data(context, state.data(), state.size())
                                : llama_state_seq_set_data(context, state.data(), state.size(), seq);
    if (size != state.size()) {
        fail("the state can't be restored");
    }
}

void script::keep_state(llama_seq_id seq, bool restore) {
    pair & p    = current();
    int    side = 0;
    for (llama_context * context : p.both()) {
        std::vector<uint8_t> & state = p.saved[side++][seq];
        if (restore) {
            restore_state(context, seq, state);
        } else {
            state = state_of(context, seq);
        }
    }
}

// Computes a sequence's tokens up to the n-th.
void script::compute_up_to(llama_context * context, llama_seq_id seq, int n) const {
    for (int pos = llama_memory_seq_pos_max(llama_get_memory(context), seq) + 1; pos < n;) {
        std::vector<token_at> tokens;
        for (const int end = std::min(n, pos + (int) llama_n_ubatch(context)); pos < end; pos++) {
            tokens.push_back({ token(seq, pos), pos, seq, false });
        }
        compute(context, tokens);
    }
}

// A context without flash attention has another layout of its state. So this also fills a context with the device's
// settings.
void script::fill(llama_seq_id seq, int n) {
    pair & p = current();
    if (!p.filled) {
        llama_context_params params = p.params;
        params.n_ubatch = params.n_batch = p.n_ubatch;
        p.filled.reset(llama_init_from_model(all.cpu.get(), params));
    }
    if (!p.filled || !p.cpu) {
        fail("there is no context");
    }
    compute_up_to(p.filled.get(), seq, n);
    compute_up_to(p.cpu.get(), seq, n);
    restore_state(p.device.get(), seq, state_of(p.filled.get(), seq));
}

llama_token script::token(llama_seq_id seq, llama_pos pos) const {
    return all.text[((size_t) pos + 997 * (size_t) seq) % all.text.size()];
}

// --- one call ---------------------------------------------------------------------------------------------------------

// Returns the states of the sequences that a call does not name.
static std::map<llama_seq_id, std::vector<uint8_t>> states_but(llama_context *                context,
                                                               const std::set<llama_seq_id> & named) {
    std::map<llama_seq_id, std::vector<uint8_t>> states;
    for (llama_seq_id seq = 0; seq < (llama_seq_id) llama_n_seq_max(context); seq++) {
        if (!named.count(seq) && llama_memory_seq_pos_max(llama_get_memory(context), seq) >= 0) {
            states[seq] = state_of(context, seq);
        }
    }
    return states;
}

static bool is_output(const part & p, int i) {
    if (p.outputs == "odd") {
        return i % 2 == 1;
    }
    if (isdigit((unsigned char) p.outputs[0])) {
        return p.pos + i >= atoi(p.outputs.c_str());
    }
    return p.outputs == "all" || (p.outputs == "last" && i == p.n - 1);
}

// Decodes a call; `given`, if not negative, replaces the text's tokens.
void script::decode(const std::vector<part> & parts, llama_token given) {
    pair &                                   p = current();
    call_line                                line;
    std::vector<token_at>                    tokens;
    std::set<llama_seq_id>                   named;
    std::vector<std::pair<int, llama_token>> outputs;  // the place in the batch, and the text's next token
    for (const part & of : parts) {
        line.parts +=
            " " + std::to_string(of.seq) + ":" + std::to_string(of.pos) + ":" + std::to_string(of.n) + ":" + of.outputs;
        named.insert(of.seq);
        for (int i = 0; i < of.n; i++) {
            if (is_output(of, i)) {
                outputs.push_back({ (int) tokens.size(), token(of.seq, of.pos + i + 1) });
            }
            tokens.push_back({ given < 0 ? token(of.seq, of.pos + i) : given, of.pos + i, of.seq, is_output(of, i) });
        }
    }
    const auto others     = states_but(p.device.get(), named);
    const auto others_cpu = p.cpu ? states_but(p.cpu.get(), named) : others;
    watched               = &line.nodes;
    compute(p.device.get(), tokens);
    watched = nullptr;
    if (p.cpu) {
        compute(p.cpu.get(), tokens);
    }
    for (const auto & [seq, state] : others) {
        // llama.cpp itself frees cells outside a sequence's window
        if (state_of(p.device.get(), seq) != state && (!p.cpu || state_of(p.cpu.get(), seq) == others_cpu.at(seq))) {
            line.changed += (line.changed.empty() ? "" : ",") + std::to_string(seq);
        }
    }
    if (p.n_embd) {
        compare_embeddings(p, named, line);
    } else {
        compare_logits(p, outputs, line);
    }
    string cpu;
    for (const auto & [op, n] : line.nodes.cpu) {
        cpu += (cpu.empty() ? "" : ",") + op + "*" + std::to_string(n);
    }
    // one call, because scripts run in threads
    printf("%d %s%s nmse=%.3e nll=%.9g nll_cpu=%.9g rows=%zu changed=%s graphs=%ld device=%ld cpu=%s\n", number,
           name.c_str(), line.parts.c_str(), line.worst, line.nll, line.nll_cpu, line.rows,
           line.changed.empty() ? "-" : line.changed.c_str(), line.nodes.graphs, line.nodes.device,
           cpu.empty() ? "-" : cpu.c_str());
    fflush(stdout);
}

void call_line::add_error(double nmse) {
    worst = std::isnan(worst) || worst >= nmse ? worst : nmse;  // NaN stays NaN
}

// Each row is the embedding of a sequence.
void script::compare_embeddings(const pair & p, const std::set<llama_seq_id> & seqs, call_line & line) const {
    for (const llama_seq_id seq : seqs) {
        const float * device = llama_get_embeddings_seq(p.device.get(), seq);
        const float * cpu    = p.cpu ? llama_get_embeddings_seq(p.cpu.get(), seq) : device;
        if (!device || !cpu) {
            fail("a sequence has no embedding");
        }
        line.add_error(nmse_of(device, cpu, p.n_embd));
    }
    line.rows = seqs.size();
}

// Returns the log likelihood of a token.
static double log_likelihood(const float * logits, size_t n_vocab, llama_token token) {
    const double most = *std::max_element(logits, logits + n_vocab);
    double       sum  = 0;
    for (size_t i = 0; i < n_vocab; i++) {
        sum += std::exp(logits[i] - most);
    }
    return logits[token] - most - std::log(sum);
}

void script::compare_logits(pair & p, const std::vector<std::pair<int, llama_token>> & outputs, call_line & line) {
    const auto n_vocab = (size_t) llama_vocab_n_tokens(llama_model_get_vocab(all.device.get()));
    const auto size    = (std::streamsize) (sizeof(float) * n_vocab);
    line.rows          = outputs.size();
    for (const auto & [at, next] : outputs) {
        const float * device = llama_get_logits_ith(p.device.get(), at);
        line.nll -= log_likelihood(device, n_vocab, next);
        p.likeliest = (llama_token) (std::max_element(device, device + n_vocab) - device);
        logits.write((const char *) device, size);  // does nothing if no file is open
        if (p.cpu) {
            const float * cpu = llama_get_logits_ith(p.cpu.get(), at);
            line.nll_cpu -= log_likelihood(cpu, n_vocab, next);
            logits_cpu.write((const char *) cpu, size);
            line.add_error(nmse_of(device, cpu, n_vocab));
        }
    }
    logits.flush();
    logits_cpu.flush();
}
