#include "script.h"

#include <algorithm>
#include <cstdlib>
#include <exception>

using std::string;

void script::run() {
    std::ifstream file(path);
    if (!file) {
        fail(path + ": can't be read");
    }
    string text;
    for (int line = 1; std::getline(file, text); line++) {
        try {
            std::istringstream words(text);
            do_line(words);
        } catch (const std::exception & error) {
            fail(path + ":" + std::to_string(line) + ": " + text + ": " + error.what());
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

template <typename T> static T read(std::istringstream & words) {
    T value;
    if (!(words >> value)) {
        fail("something is missing");
    }
    return value;
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

void script::do_line(std::istringstream & words) {
    string verb;
    if (!(words >> verb) || verb[0] == '#') {
        return;
    }
    if (verb == "context") {
        name = read<string>(words);
        make_context(words);
    } else if (verb == "use") {
        name = read<string>(words);
        current();
    } else if (verb == "end") {
        contexts.erase(read<string>(words));
    } else if (verb == "decode") {
        std::vector<part> parts;
        for (string word; words >> word;) {
            parts.push_back(read_part(word));
        }
        decode(parts);
    } else if (verb == "greedy") {
        const auto seq = read<int>(words);
        const auto pos = read<int>(words);
        const auto n   = read<int>(words);
        for (int i = 0; i < n; i++) {
            if (current().likeliest < 0) {
                fail("no call has logits");
            }
            decode(
                {
                    { seq, pos + i, 1, "last" }
            },
                current().likeliest);
        }
    } else if (verb == "fill") {
        const auto seq = read<int>(words);
        fill(seq, read<int>(words));
    } else if (verb == "forget") {
        const auto seq  = read<int>(words);
        const auto from = read<int>(words);
        const auto to   = read<int>(words);
        for (llama_context * context : current().both()) {
            if (!llama_memory_seq_rm(llama_get_memory(context), seq, from, to)) {
                fail("it can't be removed");
            }
        }
    } else if (verb == "shift") {
        const auto seq  = read<int>(words);
        const auto from = read<int>(words);
        const auto to   = read<int>(words);
        const auto by   = read<int>(words);
        for (llama_context * context : current().both()) {
            if (!llama_memory_can_shift(llama_get_memory(context))) {
                fail("it can't be shifted");
            }
            llama_memory_seq_add(llama_get_memory(context), seq, from, to, by);
        }
    } else if (verb == "copy") {
        const auto seq  = read<int>(words);
        const auto to   = read<int>(words);
        const auto from = read<int>(words);
        const auto end  = read<int>(words);
        for (llama_context * context : current().both()) {
            llama_memory_seq_cp(llama_get_memory(context), seq, to, from, end);
        }
    } else if (verb == "adapters") {
        set_adapters(words);
    } else if (verb == "save" || verb == "restore") {
        keep_state(read<int>(words), verb == "restore");
    } else if (verb == "logits") {
        logits.open(read<string>(words), std::ios::binary);
        if (string file; words >> file) {
            logits_cpu.open(file, std::ios::binary);
        }
    } else {
        fail("this is not a verb");
    }
}

void script::make_context(std::istringstream & words) {
    llama_context_params params = llama_context_default_params();
    params.n_threads            = 1;
    params.n_threads_batch      = 1;
    params.no_perf              = true;
    params.swa_full             = false;  // as in llama.cpp's programs and in kernelgen model
    params.flash_attn_type      = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    bool   with_cpu             = true;
    bool   cpu_flash_attn       = true;
    int    cpu_n_ubatch         = 0;
    string word;
    while (words >> word) {
        const size_t equals = word.find('=');
        const string key    = word.substr(0, equals);
        const int    value  = equals == string::npos ? 0 : atoi(word.c_str() + equals + 1);
        if (key == "n_ctx") {
            params.n_ctx = (uint32_t) value;
        } else if (key == "n_batch") {
            params.n_batch = (uint32_t) value;
        } else if (key == "n_ubatch") {
            params.n_ubatch = (uint32_t) value;
        } else if (key == "n_seq_max") {
            params.n_seq_max = (uint32_t) value;
        } else if (key == "kv_unified") {
            params.kv_unified = value != 0;
        } else if (key == "swa_full") {
            params.swa_full = value != 0;
        } else if (key == "type_k") {
            params.type_k = (enum ggml_type) value;
        } else if (key == "type_v") {
            params.type_v = (enum ggml_type) value;
        } else if (key == "causal") {
            params.attention_type = value ? LLAMA_ATTENTION_TYPE_CAUSAL : LLAMA_ATTENTION_TYPE_NON_CAUSAL;
        } else if (key == "embeddings") {
            params.embeddings = value != 0;
        } else if (key == "watched") {
            params.cb_eval = value ? [](ggml_tensor *, bool, void *) { return true; } : (ggml_backend_sched_eval_callback) nullptr;
        } else if (key == "flash_attn") {
            params.flash_attn_type = value ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        } else if (key == "cpu") {
            with_cpu = value != 0;
        } else if (key == "cpu_flash_attn") {
            cpu_flash_attn = value != 0;
        } else if (key == "cpu_n_ubatch") {
            cpu_n_ubatch = value;
        } else {
            fail(key + " is not a key of a context");
        }
    }
    pair made;
    made.device.reset(llama_init_from_model(all.device, params));
    made.params     = params;
    params.n_ubatch = cpu_n_ubatch ? (uint32_t) cpu_n_ubatch : params.n_ubatch;
    params.n_batch  = std::max(params.n_batch, params.n_ubatch);
    made.n_ubatch   = params.n_ubatch;
    if (with_cpu) {
        params.cb_eval         = nullptr;
        params.flash_attn_type = cpu_flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        made.cpu.reset(llama_init_from_model(all.cpu, params));
    }
    if (!made.device || (with_cpu && !made.cpu)) {
        fail("there is no context");
    }
    if (params.embeddings) {
        made.n_embd = llama_pooling_type(made.device.get()) == LLAMA_POOLING_TYPE_RANK
                          ? (int) llama_model_n_cls_out(all.device)
                          : llama_model_n_embd_out(all.device);
    }
    contexts[name] = std::move(made);
}

// Each of the two models loads an adapter once, and frees it.
llama_adapter_lora * script::load_adapter(llama_model * model, const string & file) {
    llama_adapter_lora *& adapter = adapters[{ model, file }];
    adapter                       = adapter ? adapter : llama_adapter_lora_init(model, file.c_str());
    if (!adapter) {
        fail(file + " can't be loaded");
    }
    return adapter;
}

void script::set_adapters(std::istringstream & words) {
    std::vector<std::pair<string, float>> given;
    for (string word; words >> word;) {
        const size_t colon = word.rfind(':');
        given.emplace_back(word.substr(0, colon), strtof(word.substr(colon + 1).c_str(), nullptr));
    }
    for (llama_context * context : current().both()) {
        llama_model *                     model = context == current().device.get() ? all.device : all.cpu;
        std::vector<llama_adapter_lora *> loaded;
        std::vector<float>                scales;
        for (const auto & [file, scale] : given) {
            loaded.push_back(load_adapter(model, file));
            scales.push_back(scale);
        }
        if (llama_set_adapters_lora(context, loaded.data(), loaded.size(), scales.data()) != 0) {
            fail("the context can't have them");
        }
    }
}

void script::keep_state(llama_seq_id seq, bool restore) {
    pair & p    = current();
    int    side = 0;
    for (llama_context * context : p.both()) {
        std::vector<uint8_t> & state = p.saved[side++][seq];
        if (!restore) {
            state = state_of(context, seq);
            continue;
        }
        llama_memory_seq_rm(llama_get_memory(context), seq, -1, -1);
        const size_t size = seq < 0 ? llama_state_set_data(context, state.data(), state.size())
                                    : llama_state_seq_set_data(context, state.data(), state.size(), seq);
        if (size != state.size()) {
            fail("the state can't be restored");
        }
    }
}

// Computes a sequence's tokens up to the n-th.
void script::compute_up_to(llama_context * context, llama_seq_id seq, int n) const {
    for (int pos = llama_memory_seq_pos_max(llama_get_memory(context), seq) + 1; pos < n;) {
        const int   n_tokens = std::min(n - pos, (int) llama_n_ubatch(context));
        llama_batch batch    = llama_batch_init(n_tokens, 0, 1);

        const std::unique_ptr<llama_batch, void (*)(llama_batch *)> freed(
            &batch, [](llama_batch * b) { llama_batch_free(*b); });
        for (int i = 0; i < n_tokens; i++, pos++) {
            batch.token[i]     = token(seq, pos);
            batch.pos[i]       = pos;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = seq;
            batch.logits[i]    = false;
        }
        batch.n_tokens = n_tokens;
        if (llama_decode(context, batch) != 0) {
            fail("the CPU can't compute it");
        }
    }
}

// A context without flash attention has another layout of its state. So this also fills a context with the device's
// settings.
void script::fill(llama_seq_id seq, int n) {
    pair & p = current();
    if (!p.filled) {
        llama_context_params params = p.params;
        params.n_ubatch = params.n_batch = p.n_ubatch;
        p.filled.reset(llama_init_from_model(all.cpu, params));
    }
    if (!p.filled || !p.cpu) {
        fail("there is no context");
    }
    compute_up_to(p.filled.get(), seq, n);
    compute_up_to(p.cpu.get(), seq, n);
    const std::vector<uint8_t> state = state_of(p.filled.get(), seq);
    llama_memory_seq_rm(llama_get_memory(p.device.get()), seq, -1, -1);
    if (llama_state_seq_set_data(p.device.get(), state.data(), state.size(), seq) != state.size()) {
        fail("the state can't be restored");
    }
}

llama_token script::token(llama_seq_id seq, llama_pos pos) const {
    return all.text[((size_t) pos + 997 * (size_t) seq) % all.text.size()];
}
