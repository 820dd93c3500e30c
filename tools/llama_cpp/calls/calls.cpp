// Makes the calls of llama_decode in scripts, on the devices of ggml-neuron and on the CPU, and compares their logits.
//
//     calls [-sm tensor] BACKENDS MODEL TEXT SCRIPT...
//
// With -sm tensor each device has slices of the model's weights, else whole layers. BACKENDS is the folder of ggml's own
// backends, MODEL a GGUF file, and TEXT a file whose tokens are the tokens of the sequences: each sequence begins at another
// place. Each script has its own contexts, and its own thread if there are several. The lines of a script:
//
//     context NAME [KEY=NUMBER...]   makes a context on each side and selects it. Keys: n_ctx, n_batch, n_ubatch, n_seq_max,
//                                    kv_unified, swa_full, flash_attn, type_k and type_v (ggml's numbers). cpu=0: no context on
//                                    the CPU; cpu_flash_attn=0: without flash attention there; cpu_n_ubatch: the CPU's n_ubatch;
//                                    causal=0: tokens also attend to later tokens; watched=1: a callback reads each node on the
//                                    device, as in llama-eval-callback; embeddings=1: calls return the embeddings of their
//                                    sequences, with the pooling in the file
//     use NAME                       selects an existing context
//     end NAME                       frees a context
//     decode SEQ:POS:N:OUTPUTS ...   one call with N tokens of each of these sequences; OUTPUTS is all, last, none, odd, or the
//                                    first position that has logits
//     greedy SEQ POS N               N calls, each with the likeliest token according to the last token's logits
//     fill SEQ N                     the CPU computes the tokens of a sequence up to the Nth, in calls of n_ubatch; the device
//                                    receives the sequence's state
//     forget SEQ FROM TO             removes positions, to the end when TO is -1
//     copy SEQ TO FROM END           adds the positions from FROM to END of a sequence to the sequence TO
//     shift SEQ FROM TO BY           adds BY to the positions from FROM to TO, as a context shift does
//     adapters FILE:SCALE ...        sets the adapters of the context's next calls, as --lora-scaled does; none: removes all
//     save SEQ                       keeps a sequence's state; -1: the whole context's
//     restore SEQ                    restores the state, after removing the current one
//     logits FILE [CPU]              appends the device's logits of the next calls to FILE, as F32, and the CPU's to the file CPU
//
// Each decode prints a line: the call; the largest normalised mean squared error of a row of logits; the negative sum of the
// log likelihoods of the text's next tokens by the device's logits and by the CPU's, and the number of rows in this sum; the
// sequences that the call did not name and whose state changed on the device but not on the CPU; and the ops in the device's
// context that the scheduler gave to the CPU (from its log with GGML_SCHED_DEBUG=2, once for each new graph).

#include "script.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>

static void run(int argc, char ** argv, enum llama_split_mode split) {
    const std::vector<ggml_backend_dev_t> devices = load_backends(argv[1]);

    models all;
    all.device = load_model(argv[2], devices, split);
    all.cpu    = load_model(argv[2], {});
    all.text   = tokens_of(all.cpu.get(), argv[3]);

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
    if (failed) {
        fail("a script ended early");
    }
}

int main(int argc, char ** argv) {
    const bool tensor = argc > 2 && strcmp(argv[1], "-sm") == 0 && strcmp(argv[2], "tensor") == 0;
    argc -= tensor ? 2 : 0;
    argv += tensor ? 2 : 0;
    return run_program(argc, 4, "calls [-sm tensor] BACKENDS MODEL TEXT SCRIPT...",
                       [=] { run(argc, argv, tensor ? LLAMA_SPLIT_MODE_TENSOR : LLAMA_SPLIT_MODE_LAYER); });
}
