// Makes the calls of llama_decode that scripts say, on the devices of ggml-neuron and on the CPU, and compares their logits.
//
//     calls [-sm tensor] BACKENDS MODEL TEXT SCRIPT...
//
// With -sm tensor each device has slices of the model's weights; else a device has layers. BACKENDS is the folder of ggml's own backends, MODEL a GGUF file, and TEXT a file whose tokens the sequences have: each begins
// elsewhere in it. Each script has contexts of its own, and a thread when there are several. Its lines:
//
//     context NAME [KEY=NUMBER...]   makes a context on each side and takes it: n_ctx, n_batch, n_ubatch, n_seq_max, kv_unified,
//                                    swa_full, flash_attn, type_k and type_v (ggml's numbers); cpu=0 makes none on the CPU, cpu_flash_attn=0
//                                    one without flash attention there; cpu_n_ubatch is n_ubatch of the CPU; with causal=0 tokens see
//                                    those that come after them; with
//                                    watched=1 a callback reads each node on the device, as llama-eval-callback's does; with
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
#include "scheduler_log.h"
#include "script.h"
#include "sides.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

static int run(int argc, char ** argv, enum llama_split_mode split) {
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
    all.device = load_model(argv[2], devices, split);
    all.cpu    = load_model(argv[2], { nullptr }, LLAMA_SPLIT_MODE_LAYER);
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
