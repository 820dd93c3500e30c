// Makes the calls of llama_decode that scripts say, on the devices of ggml-neuron and on the CPU, and compares their logits.
//
//     calls [-sm tensor] BACKENDS MODEL TEXT SCRIPT...
//
// With -sm tensor each device has slices of the model's weights; else a device has layers. BACKENDS is the folder of ggml's own backends, MODEL a GGUF file, and TEXT a file whose tokens the sequences have: each begins
// elsewhere in it. Each script has contexts of its own, and a thread when there are several. Its lines:
//
//     context NAME [KEY=NUMBER...]   makes a context on each side and takes it: n_ctx, n_batch, n_ubatch, n_seq_max, kv_unified,
//                                    swa_full, type_k and type_v (ggml's numbers); cpu=0 makes none on the CPU, cpu_flash_attn=0
//                                    one without flash attention there; cpu_n_ubatch is n_ubatch of the CPU; with causal=0 tokens see
//                                    those that come after them; with
//                                    embeddings=1 calls want the embeddings of their sequences, pooled as the file says
//     use NAME                       takes a context that was made
//     end NAME                       frees one
//     decode SEQ:POS:N:OUTPUTS ...   one call with N tokens of each of these sequences; OUTPUTS is all, last, none, odd, or the
//                                    position from which on there are logits
//     greedy SEQ POS N               as many calls, each with the likeliest token behind the logits of the last call's last token
//     fill SEQ N                     the CPU computes the tokens of a sequence up to the Nth, in calls of n_ubatch, and the device gets its state
//     forget SEQ FROM TO             removes positions, to the end when TO is -1
//     copy SEQ TO FROM END           the positions from FROM to END become the sequence TO's, too
//     shift SEQ FROM TO BY           the positions from FROM to TO differ by BY from now on, as a context shift has it
//     adapters FILE:SCALE ...        from now on the context's calls have these adapters alone, as --lora-scaled gives them; none: no more
//     save SEQ                       keeps a sequence's state; with -1 the whole context's
//     restore SEQ                    puts it back, after removing what is there
//     logits FILE [CPU]              from now on the device's logits are appended to FILE, as F32, and the CPU's to the file CPU
//
// Each decode prints a line: what it was, the largest normalised mean squared error of a row of logits, how likely the next tokens
// of the text are by the device's logits and by the CPU's (the negative sum of their logarithms), how many rows that sums, the
// sequences that the call did not name and whose state differs now, though not on the CPU, and the ops of graphs that the scheduler gave
// to the CPU in the device's context (it tells with GGML_SCHED_DEBUG=2, once for each graph it makes).

#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using std::string;

[[noreturn]] void fail(const string & message) {
    throw std::runtime_error(message);
}

//
// what the scheduler says
//

struct assigned {
    long                   device = 0;
    long                   graphs = 0;
    std::map<string, long> cpu;  // by op, whose name is cut after ten characters
};

// Where the nodes of the graphs that this thread has made go; NULL: nowhere.
thread_local assigned * watched = nullptr;

// "node # 12 (   MUL_MAT):  Qcur-0 (  16K) [NEURO         ] use=…": names of backends are cut after five characters
void read_log(enum ggml_log_level level, const char * text, void * /* user_data */) {
    if (level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN) {
        fputs(text, stderr);
    }
    char op[16];
    char backend[16];
    int  index = 0;
    if (!watched || sscanf(text, "node #%d ( %15[^)]): %*[^[][ %15[A-Za-z0-9]", &index, op, backend) != 3) {
        return;
    }
    watched->graphs += index == 0;
    if (strncmp(backend, "NEURO", 5) == 0 || strncmp(backend, "Meta", 4) == 0) {
        watched->device++;
    } else {
        watched->cpu[op]++;
    }
}

//
// the two sides
//

struct models {
    llama_model *            device = nullptr;
    llama_model *            cpu    = nullptr;
    std::vector<llama_token> text;
};

struct free_context {
    void operator()(llama_context * context) const { llama_free(context); }
};

using context_ptr = std::unique_ptr<llama_context, free_context>;

// A context of the device and one of the CPU, that are told the same.
struct pair {
    context_ptr                                  device;
    context_ptr                                  cpu;
    std::map<llama_seq_id, std::vector<uint8_t>> saved[2];
    context_ptr                                  filled;          // of the CPU, with the device's settings
    llama_context_params                         params    = {};  // of the device
    uint32_t                                     n_ubatch  = 0;   // of the CPU
    llama_token                                  likeliest = -1;  // by the device's last logits
    int                                          n_embd = 0;  // elements of a sequence's embedding; 0: there are logits

    std::vector<llama_context *> both() const {
        return cpu ? std::vector<llama_context *>{ device.get(), cpu.get() }
                   : std::vector<llama_context *>{ device.get() };
    }
};

std::vector<uint8_t> state_of(llama_context * context, llama_seq_id seq) {
    std::vector<uint8_t> state(seq < 0 ? llama_state_get_size(context) : llama_state_seq_get_size(context, seq));
    const size_t         size = seq < 0 ? llama_state_get_data(context, state.data(), state.size())
                                        : llama_state_seq_get_data(context, state.data(), state.size(), seq);
    if (size != state.size()) {
        fail("the state has another size");
    }
    return state;
}

double square(double x) {
    return x * x;
}

// Returns the logarithm of how likely a token is.
double log_likelihood(const float * logits, int n_vocab, llama_token token) {
    const double most = *std::max_element(logits, logits + n_vocab);
    double       sum  = 0;
    for (int i = 0; i < n_vocab; i++) {
        sum += std::exp(logits[i] - most);
    }
    return logits[token] - most - std::log(sum);
}

struct part {
    llama_seq_id seq;
    llama_pos    pos;
    int          n;
    string       outputs;
};

//
// scripts
//

std::mutex printing;

class script {
  public:
    script(const models & all, int number, string path) : all(all), number(number), path(std::move(path)) {}

    // Raises std::runtime_error, with the line.
    void run() {
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

  private:
    const models &                                                   all;
    const int                                                        number;
    const string                                                     path;
    std::map<string, pair>                                           contexts;
    string                                                           name;
    std::map<std::pair<llama_model *, string>, llama_adapter_lora *> adapters;
    std::ofstream                                                    logits;
    std::ofstream                                                    logits_cpu;

    pair & current() {
        const auto found = contexts.find(name);
        if (found == contexts.end()) {
            fail("there is no context " + name);
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

    void do_line(std::istringstream & words) {
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

    void make_context(std::istringstream & words) {
        llama_context_params params = llama_context_default_params();
        params.n_threads            = 1;
        params.n_threads_batch      = 1;
        params.no_perf              = true;
        params.swa_full             = false;  // as llama.cpp's programs have it, and kernelgen model
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

    // An adapter is loaded once for each of the models, which free it.
    llama_adapter_lora * load_adapter(llama_model * model, const string & file) {
        llama_adapter_lora *& adapter = adapters[{ model, file }];
        adapter                       = adapter ? adapter : llama_adapter_lora_init(model, file.c_str());
        if (!adapter) {
            fail(file + " can't be loaded");
        }
        return adapter;
    }

    void set_adapters(std::istringstream & words) {
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

    void keep_state(llama_seq_id seq, bool restore) {
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
    void compute_up_to(llama_context * context, llama_seq_id seq, int n) const {
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

    // The state of a context without flash attention has another layout, so that one with the device's settings is filled, too.
    void fill(llama_seq_id seq, int n) {
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

    llama_token token(llama_seq_id seq, llama_pos pos) const {
        return all.text[((size_t) pos + 997 * (size_t) seq) % all.text.size()];
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

    static bool is_output(const part & p, int i) {
        if (p.outputs == "odd") {
            return i % 2 == 1;
        }
        if (isdigit((unsigned char) p.outputs[0])) {
            return p.pos + i >= atoi(p.outputs.c_str());
        }
        return p.outputs == "all" || (p.outputs == "last" && i == p.n - 1);
    }

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

    // With a token that is `given`, a call of it.
    void decode(const std::vector<part> & parts, llama_token given = -1) {
        string what;
        int    n_tokens = 0;
        for (const part & of : parts) {
            n_tokens += of.n;
            what += " " + std::to_string(of.seq) + ":" + std::to_string(of.pos) + ":" + std::to_string(of.n) + ":" +
                    of.outputs;
        }
        pair &                                                      p     = current();
        llama_batch                                                 batch = llama_batch_init(n_tokens, 0, 1);
        const std::unique_ptr<llama_batch, void (*)(llama_batch *)> freed(
            &batch, [](llama_batch * b) { llama_batch_free(*b); });
        std::set<llama_seq_id>                   named;
        std::vector<std::pair<int, llama_token>> outputs;  // in the batch, and the token that follows in the text
        for (const part & of : parts) {
            named.insert(of.seq);
            for (int i = 0; i < of.n; i++) {
                const int at        = batch.n_tokens++;
                batch.token[at]     = given < 0 ? token(of.seq, of.pos + i) : given;
                batch.pos[at]       = of.pos + i;
                batch.n_seq_id[at]  = 1;
                batch.seq_id[at][0] = of.seq;
                batch.logits[at]    = is_output(of, i);
                if (batch.logits[at]) {
                    outputs.push_back({ at, token(of.seq, of.pos + i + 1) });
                }
            }
        }
        const auto others     = states_but(p.device.get(), named);
        const auto others_cpu = p.cpu ? states_but(p.cpu.get(), named) : others;
        assigned   found;
        watched                = &found;
        const bool    encodes  = llama_model_has_encoder(all.cpu) && !llama_model_has_decoder(all.cpu);
        const auto    compute  = encodes ? llama_encode : llama_decode;
        const int32_t computed = compute(p.device.get(), batch);
        llama_synchronize(p.device.get());
        watched = nullptr;
        if (computed != 0 || (p.cpu && compute(p.cpu.get(), batch) != 0)) {
            fail("llama_decode returns " + std::to_string(computed));
        }
        string changed;
        for (const auto & [seq, state] : others) {
            // llama.cpp itself gives cells away that are out of a sequence's window
            if (state_of(p.device.get(), seq) != state &&
                (!p.cpu || state_of(p.cpu.get(), seq) == others_cpu.at(seq))) {
                changed += (changed.empty() ? "" : ",") + std::to_string(seq);
            }
        }
        if (p.n_embd) {
            report_embeddings(what, p, named, found);
        } else {
            report(what, p, outputs, changed, found);
        }
    }

    static double nmse_of(const float * device, const float * cpu, int n) {
        double error = 0;
        double size  = 0;
        for (int i = 0; i < n; i++) {
            error += square((double) device[i] - cpu[i]);
            size += square(cpu[i]);
        }
        return error / size;
    }

    // Rows are sequences.
    void report_embeddings(const string & what, pair & p, const std::set<llama_seq_id> & seqs, const assigned & found) {
        double worst = 0;
        for (const llama_seq_id seq : seqs) {
            const float * device = llama_get_embeddings_seq(p.device.get(), seq);
            const float * cpu    = p.cpu ? llama_get_embeddings_seq(p.cpu.get(), seq) : device;
            if (!device || !cpu) {
                fail("a sequence has no embedding");
            }
            const double nmse = nmse_of(device, cpu, p.n_embd);
            worst             = std::isnan(worst) || worst >= nmse ? worst : nmse;
        }
        print(what, worst, 0, 0, seqs.size(), "", found);
    }

    void print(const string &   what,
               double           worst,
               double           nll,
               double           nll_cpu,
               size_t           rows,
               const string &   changed,
               const assigned & found) {
        string cpu;
        for (const auto & [op, n] : found.cpu) {
            cpu += (cpu.empty() ? "" : ",") + op + "*" + std::to_string(n);
        }
        const std::lock_guard<std::mutex> lock(printing);
        printf("%d %s%s nmse=%.3e nll=%.9g nll_cpu=%.9g rows=%zu changed=%s graphs=%ld device=%ld cpu=%s\n", number,
               name.c_str(), what.c_str(), worst, nll, nll_cpu, rows, changed.empty() ? "-" : changed.c_str(),
               found.graphs, found.device, cpu.empty() ? "-" : cpu.c_str());
        fflush(stdout);
    }

    void report(const string &                                   what,
                pair &                                           p,
                const std::vector<std::pair<int, llama_token>> & outputs,
                const string &                                   changed,
                const assigned &                                 found) {
        const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(all.device));
        double    worst   = 0;
        double    nll     = 0;
        double    nll_cpu = 0;
        for (const auto & [at, next] : outputs) {
            const float * device = llama_get_logits_ith(p.device.get(), at);
            nll -= log_likelihood(device, n_vocab, next);
            p.likeliest = (llama_token) (std::max_element(device, device + n_vocab) - device);
            if (logits.is_open()) {
                logits.write((const char *) device, (std::streamsize) (sizeof(float) * (size_t) n_vocab));
            }
            if (!p.cpu) {
                continue;
            }
            const float * cpu = llama_get_logits_ith(p.cpu.get(), at);
            nll_cpu -= log_likelihood(cpu, n_vocab, next);
            if (logits_cpu.is_open()) {
                logits_cpu.write((const char *) cpu, (std::streamsize) (sizeof(float) * (size_t) n_vocab));
            }
            const double nmse = nmse_of(device, cpu, n_vocab);
            worst             = std::isnan(worst) || worst >= nmse ? worst : nmse;  // NaN stays
        }
        print(what, worst, nll, nll_cpu, outputs.size(), changed, found);
        if (logits.is_open()) {
            logits.flush();
            logits_cpu.flush();
        }
    }
};

llama_model * load(const char * path, const std::vector<ggml_backend_dev_t> & devices, enum llama_split_mode split) {
    llama_model_params params = llama_model_default_params();
    params.devices            = const_cast<ggml_backend_dev_t *>(devices.data());
    params.n_gpu_layers       = devices.front() ? 999 : 0;
    params.split_mode         = split;
    llama_model * model       = llama_model_load_from_file(path, params);
    if (!model) {
        fail(string(path) + ": it can't be loaded");
    }
    return model;
}

std::vector<llama_token> tokens_of(const llama_model * model, const char * path) {
    std::ifstream file(path, std::ios::binary);
    const string  text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (text.empty()) {
        fail(string(path) + ": no text");
    }
    const llama_vocab *      vocab = llama_model_get_vocab(model);
    std::vector<llama_token> tokens(text.size() + 8);
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {  // the bytes, then, as a hash of where they are
        const auto n_vocab = (uint32_t) llama_vocab_n_tokens(vocab);
        tokens.resize(text.size());
        for (size_t i = 0; i < text.size(); i++) {
            tokens[i] = (llama_token) (((uint8_t) text[i] * 2654435761u ^ (uint32_t) i * 40503u) % n_vocab);
        }
        return tokens;
    }
    const int n =
        llama_tokenize(vocab, text.data(), (int32_t) text.size(), tokens.data(), (int32_t) tokens.size(), false, false);
    if (n < 1) {
        fail(string(path) + ": no tokens");
    }
    tokens.resize((size_t) n);
    return tokens;
}

int run(int argc, char ** argv, enum llama_split_mode split) {
    llama_log_set(read_log, nullptr);
    ggml_backend_load_all_from_path(argv[1]);
    if (const char * plugin = getenv("GGML_BACKEND_PATH")) {
        ggml_backend_load(plugin);
    }
    std::vector<ggml_backend_dev_t> devices;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (strncmp(ggml_backend_dev_name(device), "NEURON", 6) == 0) {
            devices.push_back(device);
        }
    }
    if (devices.empty()) {
        fail("there is no NeuronCore");
    }
    devices.push_back(nullptr);
    models all;
    all.device = load(argv[2], devices, split);
    all.cpu    = load(argv[2], { nullptr }, LLAMA_SPLIT_MODE_LAYER);
    all.text   = tokens_of(all.cpu, argv[3]);

    std::vector<std::thread> threads;
    std::atomic<bool>        failed{ false };
    for (int i = 4; i < argc; i++) {
        const auto work = [&all, &failed, i, argv] {
            try {
                script(all, i - 4, argv[i]).run();
            } catch (const std::exception & error) {
                fprintf(stderr, "calls: %s\n", error.what());
                failed = true;
            }
        };
        if (argc == 5) {
            work();
        } else {
            threads.emplace_back(work);
        }
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    llama_model_free(all.device);
    llama_model_free(all.cpu);
    llama_backend_free();
    return failed ? 1 : 0;
}

}  // namespace

int main(int argc, char ** argv) {
    const bool tensor = argc > 2 && strcmp(argv[1], "-sm") == 0 && strcmp(argv[2], "tensor") == 0;
    argc -= tensor ? 2 : 0;
    argv += tensor ? 2 : 0;
    if (argc < 5) {
        fprintf(stderr, "calls [-sm tensor] BACKENDS MODEL TEXT SCRIPT...\n");
        return 2;
    }
    try {
        return run(argc, argv, tensor ? LLAMA_SPLIT_MODE_TENSOR : LLAMA_SPLIT_MODE_LAYER);
    } catch (const std::exception & error) {
        fprintf(stderr, "calls: %s\n", error.what());
        return 1;
    }
}
