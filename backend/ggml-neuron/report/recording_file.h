#pragma once

#include <mutex>
#include <string>

// What a process adds to a file that other processes record into as well. A subclass writes; its destructor flushes.
class neuron_recording_file {
  public:
    // Writes what is not written yet, if need be when other processes have done so.
    void flush();

  protected:
    // variable: the environment variable that names the file. lost: what a message says is not in the file when
    // another process keeps it locked.
    neuron_recording_file(const char * variable, const char * lost) : variable(variable), lost(lost) {}

    ~neuron_recording_file() = default;

    // Writes what is pending, with the mutex held. Returns false when another process is at it.
    virtual bool write() = 0;

    // Returns what another process can keep locked.
    virtual std::string locked() const = 0;

    // Says why nothing more is recorded. Needs the mutex.
    void fail(const std::string & message);

    std::mutex mutex;
    bool       failed = false;

  private:
    const char * const variable;
    const char * const lost;
};
