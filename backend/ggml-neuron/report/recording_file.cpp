#include "report/recording_file.h"

#include "report/log.h"

#include <chrono>
#include <thread>

namespace {

// The number of attempts to lock the file before data is lost, and the pause between them. Any process can keep the
// lock forever.
constexpr int                       LOCK_TRIES = 100;
constexpr std::chrono::milliseconds LOCK_PAUSE{ 50 };

}  // namespace

void neuron_recording_file::flush() {
    for (int i = 0; i < LOCK_TRIES; i++) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (write()) {
                return;
            }
        }
        std::this_thread::sleep_for(LOCK_PAUSE);
    }
    std::lock_guard<std::mutex> lock(mutex);
    fail("another process keeps " + locked() + " locked, so the last " + lost + " are not in it");
}

void neuron_recording_file::fail(const std::string & message) {
    failed = true;
    NEURON_ERROR("%s: %s: recording is off\n", variable, message.c_str());
}
