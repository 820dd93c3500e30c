// One call of a script, and the line that it prints.

#include "script.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>

using std::string;

static std::mutex printing;

static double square(double x) {
    return x * x;
}

// Returns the log likelihood of a token.
static double log_likelihood(const float * logits, int n_vocab, llama_token token) {
    const double most = *std::max_element(logits, logits + n_vocab);
    double       sum  = 0;
    for (int i = 0; i < n_vocab; i++) {
        sum += std::exp(logits[i] - most);
    }
    return logits[token] - most - std::log(sum);
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

static double nmse_of(const float * device, const float * cpu, int n) {
    double error = 0;
    double size  = 0;
    for (int i = 0; i < n; i++) {
        error += square((double) device[i] - cpu[i]);
        size += square(cpu[i]);
    }
    return error / size;
}

// Decodes a call; `given`, if not negative, replaces the text's tokens.
void script::decode(const std::vector<part> & parts, llama_token given) {
    string what;
    int    n_tokens = 0;
    for (const part & of : parts) {
        n_tokens += of.n;
        what +=
            " " + std::to_string(of.seq) + ":" + std::to_string(of.pos) + ":" + std::to_string(of.n) + ":" + of.outputs;
    }
    pair &                                                      p     = current();
    llama_batch                                                 batch = llama_batch_init(n_tokens, 0, 1);
    const std::unique_ptr<llama_batch, void (*)(llama_batch *)> freed(&batch,
                                                                      [](llama_batch * b) { llama_batch_free(*b); });
    std::set<llama_seq_id>                                      named;
    std::vector<std::pair<int, llama_token>> outputs;  // the place in the batch, and the text's next token
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
        // llama.cpp itself frees cells outside a sequence's window
        if (state_of(p.device.get(), seq) != state && (!p.cpu || state_of(p.cpu.get(), seq) == others_cpu.at(seq))) {
            changed += (changed.empty() ? "" : ",") + std::to_string(seq);
        }
    }
    if (p.n_embd) {
        report_embeddings(what, p, named, found);
    } else {
        report(what, p, outputs, changed, found);
    }
}

// Each row is the embedding of a sequence.
void script::report_embeddings(const string &                 what,
                               pair &                         p,
                               const std::set<llama_seq_id> & seqs,
                               const assigned &               found) {
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

void script::print(const string &   what,
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
           name.c_str(), what.c_str(), worst, nll, nll_cpu, rows, changed.empty() ? "-" : changed.c_str(), found.graphs,
           found.device, cpu.empty() ? "-" : cpu.c_str());
    fflush(stdout);
}

void script::report(const string &                                   what,
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
        worst             = std::isnan(worst) || worst >= nmse ? worst : nmse;  // NaN stays NaN
    }
    print(what, worst, nll, nll_cpu, outputs.size(), changed, found);
    if (logits.is_open()) {
        logits.flush();
        logits_cpu.flush();
    }
}
