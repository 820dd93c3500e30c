#pragma once

#include <mutex>
#include <string>

// A process's additions to a file to which other processes also record. A subclass writes; its destructor flushes.
class neuron_recording_file {
  public:
    // Writes all pending additions; waits for other processes if necessary.
    void flush();

  protected:
    // `variable`: the environment variable that names the file. `lost`: a message's text on the data that is lost when
    // another process keeps the file locked.
    neuron_recording_file(const char * variable, const char * lost) : variable(variable), lost(lost) {}

    ~neuron_recording_file() = default;

    // Writes the pending additions; the mutex is locked. Returns false when another process is writing.
    virtual bool write() = 0;

    // Returns what another process keeps locked: the file or its folder, for a message.
    virtual std::string locked() const = 0;

    // Reports why recording ends. The caller holds the mutex.
    void fail(const std::string & message);

    std::mutex mutex;
    bool       failed = false;

  private:
    const char * const variable;
    const char * const lost;
};
