// Executions that fail, and helper processes that are killed.

#include "../values.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "placed.h"
#include "scenario.h"

#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// Returns state and parent of a process or thread from its `stat` file in /proc; parent 0 when there is none.
static std::pair<char, pid_t> status_of(const std::string & path) {
    std::ifstream file(path);
    std::string   text;
    std::getline(file, text);
    // behind the program's name, which is in parentheses
    const size_t end    = text.rfind(')');
    char         state  = 0;
    int          parent = 0;
    if (end == std::string::npos || sscanf(text.c_str() + end + 1, " %c %d", &state, &parent) != 2) {
        return { 0, 0 };
    }
    return { state, (pid_t) parent };
}

// Returns the numbers among the names in a folder of /proc.
static std::vector<pid_t> numbers_in(const std::string & folder) {
    std::vector<pid_t> found;
    DIR *              dir = opendir(folder.c_str());
    while (const dirent * entry = dir ? readdir(dir) : nullptr) {
        if (atoi(entry->d_name) > 0) {
            found.push_back((pid_t) atoi(entry->d_name));
        }
    }
    if (dir) {
        closedir(dir);
    }
    return found;
}

// Returns the child processes of this one.
static std::vector<pid_t> children() {
    std::vector<pid_t> found;
    for (const pid_t pid : numbers_in("/proc")) {
        if (status_of("/proc/" + std::to_string(pid) + "/stat").second == getpid()) {
            found.push_back(pid);
        }
    }
    return found;
}

// Stops a process and waits until all its threads have stopped.
static void stop(pid_t pid) {
    kill(pid, SIGSTOP);
    const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
    for (int i = 0; i < 1000; i++) {
        bool running = false;
        for (const pid_t thread : numbers_in(tasks)) {
            running = running || status_of(tasks + "/" + std::to_string(thread) + "/stat").first != 'T';
        }
        if (!running) {
            return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    fail("the helper does not stop");
}

// An execution that fails, or may fail, because of `spoil`, and one after it.
static void fails_once(const std::function<void()> & spoil, bool computes, bool surely = true) {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    placed           graph(backend, add);
    fill(graph.b.inputs[0], 1);
    graph.compute_at_once();
    spoil();
    const ggml_status second = ggml_backend_graph_compute(backend.get(), graph.graph);
    if (second == GGML_STATUS_SUCCESS && !surely) {
        compare(read(graph.b.result), numbers(256, 1));
    } else {
        check(second == GGML_STATUS_FAILED, std::string("the second execution: ") + ggml_status_to_string(second));
    }
    graph.compute_at_once();
    if (computes) {
        compare(read(graph.b.result), numbers(256, 1));
    }
}

static built two_kernels(ggml_context * ctx) {
    ggml_tensor * a = f32(ctx, 64, 4);
    ggml_tensor * b = f32(ctx, 64, 4);
    return built{
        ggml_sub(ctx, a, ggml_add(ctx, a, b)), { a, b }
    };
}

// Runs two kernels in turn, without checking their results.
static void in_turn(int times) {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    placed           graph(backend, two_kernels);
    for (int i = 0; i < times; i++) {
        graph.compute_at_once();
    }
}

// Does the same, and frees a buffer before the last time.
static void freed_before_the_last(int times) {
    ggml_backend_ptr        backend(ggml_backend_dev_init(neuron, nullptr));
    ggml_backend_buffer_ptr other(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(neuron), 1 << 20));
    placed                  graph(backend, two_kernels);
    for (int i = 0; i < times; i++) {
        if (i + 1 == times) {
            other.reset();
        }
        graph.compute_at_once();
    }
}

// The pack is overwritten or truncated after the first of two programs was unloaded for the second.
static void rewritten(bool cut) {
    ggml_backend_ptr backend(ggml_backend_dev_init(neuron, nullptr));
    placed           graph(backend, two_kernels);
    graph.set(0);
    graph.compute_at_once();
    const std::string pack = getenv("GGML_NEURON_KERNEL_DIR");
    const auto        half = std::filesystem::file_size(pack) / 4;  // the index was read before
    if (cut) {
        std::filesystem::resize_file(pack, half);
    } else {
        std::fstream file(pack, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp((std::streamoff) half);
        file << std::string(3 * half, 'x');
    }
    graph.compute_at_once(GGML_STATUS_FAILED);
    graph.compute_at_once();  // by the CPU
    compare(graph.get(), run(cpu, two_kernels));
}

// The simulator's helper process is killed during an execution: another helper takes over the execution if the first
// one has not read it yet.
static void killed() {
    struct joined {
        std::thread thread;

        ~joined() {
            if (thread.joinable()) {
                thread.join();
            }
        }
    } killer;

    fails_once(
        [&killer] {
            const std::vector<pid_t> helpers = children();
            check(!helpers.empty(), "the simulator runs no helper that could be killed");
            for (const pid_t pid : helpers) {
                stop(pid);  // so that it does not finish before the kill
            }
            killer.thread = std::thread([helpers] {
                std::this_thread::sleep_for(std::chrono::seconds(1));  // by then it has the request
                for (const pid_t pid : helpers) {
                    kill(pid, SIGKILL);
                }
            });
        },
        true, false);
}

scenario_table failures_scenarios() {
    return {
        { "in-turn",       [] { in_turn(2); }               },
        { "in-turn-often", [] { in_turn(40); }              },
        { "given-back",    [] { freed_before_the_last(5); } },
        { "killed",        killed                           },
        { "rewritten",     [] { rewritten(false); }         },
        { "cut",           [] { rewritten(true); }          },
        { "fails-once",    [] { fails_once([] {}, false); } },
    };
}
