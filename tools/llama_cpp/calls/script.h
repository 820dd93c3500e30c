// A script: contexts, and calls with them. calls.cpp describes its lines.

#pragma once

#include "sides.h"

#include <cstdint>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

struct models {
    model_ptr                device;
    model_ptr                cpu;
    std::vector<llama_token> text;
};

// A context on the device and one on the CPU, which get the same calls.
struct pair {
    context_ptr                                  device;
    context_ptr                                  cpu;
    std::map<llama_seq_id, std::vector<uint8_t>> saved[2];
    context_ptr                                  filled;          // on the CPU, with the device's settings
    llama_context_params                         params    = {};  // the device's
    uint32_t                                     n_ubatch  = 0;   // the CPU's
    llama_token                                  likeliest = -1;  // by the device's last logits
    size_t                                       n_embd = 0;  // elements of a sequence's embedding; 0: there are logits

    std::vector<llama_context *> both() const {
        return cpu ? std::vector<llama_context *>{ device.get(), cpu.get() }
                   : std::vector<llama_context *>{ device.get() };
    }
};

// Some tokens of a sequence in a call; `outputs` says which of them have logits.
struct part {
    llama_seq_id seq;
    llama_pos    pos;
    int          n;
    std::string  outputs;
};

// The line that a call prints.
struct call_line {
    std::string parts;
    double      worst   = 0;
    double      nll     = 0;
    double      nll_cpu = 0;
    size_t      rows    = 0;
    std::string changed;
    assigned    nodes;

    void add_error(double nmse);
};

class script {
  public:
    script(const models & all, int number, std::string path) : all(all), number(number), path(std::move(path)) {}

    // Raises std::runtime_error with the line of the script.
    void run();

  private:
    using words = std::istringstream;

    pair &      current();
    void        do_line(words & line);
    void        make_context(words & line);
    void        set_adapters(words & line);
    void        keep_state(llama_seq_id seq, bool restore);
    void        compute_up_to(llama_context * context, llama_seq_id seq, int n) const;
    void        fill(llama_seq_id seq, int n);
    llama_token token(llama_seq_id seq, llama_pos pos) const;
    void        decode(const std::vector<part> & parts, llama_token given = -1);
    void        compare_embeddings(const pair & p, const std::set<llama_seq_id> & seqs, call_line & line) const;
    void        compare_logits(pair & p, const std::vector<std::pair<int, llama_token>> & outputs, call_line & line);

    const models &              all;
    const int                   number;
    const std::string           path;
    std::map<std::string, pair> contexts;
    std::string                 name;
    std::ofstream               logits;
    std::ofstream               logits_cpu;

    std::map<std::pair<llama_model *, std::string>, llama_adapter_lora *> adapters;
};
