// A script: contexts, and calls with them. calls.cpp describes its lines.

#pragma once

#include "scheduler_log.h"
#include "sides.h"

#include <cstddef>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

struct part {
    llama_seq_id seq;
    llama_pos    pos;
    int          n;
    std::string  outputs;
};

class script {
  public:
    script(const models & all, int number, std::string path) : all(all), number(number), path(std::move(path)) {}

    // Raises std::runtime_error with the line of the script.
    void run();

  private:
    pair & current();

    void do_line(std::istringstream & words);

    void make_context(std::istringstream & words);

    llama_adapter_lora * load_adapter(llama_model * model, const std::string & file);

    void set_adapters(std::istringstream & words);

    void keep_state(llama_seq_id seq, bool restore);

    void compute_up_to(llama_context * context, llama_seq_id seq, int n) const;

    void fill(llama_seq_id seq, int n);

    llama_token token(llama_seq_id seq, llama_pos pos) const;

    void decode(const std::vector<part> & parts, llama_token given = -1);

    void report_embeddings(const std::string &            what,
                           pair &                         p,
                           const std::set<llama_seq_id> & seqs,
                           const assigned &               found);

    void print(const std::string & what,
               double              worst,
               double              nll,
               double              nll_cpu,
               size_t              rows,
               const std::string & changed,
               const assigned &    found);

    void report(const std::string &                              what,
                pair &                                           p,
                const std::vector<std::pair<int, llama_token>> & outputs,
                const std::string &                              changed,
                const assigned &                                 found);

    const models &                                                        all;
    const int                                                             number;
    const std::string                                                     path;
    std::map<std::string, pair>                                           contexts;
    std::string                                                           name;
    std::map<std::pair<llama_model *, std::string>, llama_adapter_lora *> adapters;
    std::ofstream                                                         logits;
    std::ofstream                                                         logits_cpu;
};
