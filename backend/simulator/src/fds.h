// File descriptors that must not outlive a fork: a child that kept one of the helper's sockets would keep the helper alive.

#pragma once

#include <utility>

namespace simulator {

// Closes every descriptor that a `unique_fd` of this process holds. Safe in a child right after fork: it takes no lock.
void close_all_fds();

// Owns a descriptor.
class unique_fd {
  public:
    unique_fd() = default;

    explicit unique_fd(int fd);

    ~unique_fd() { reset(); }

    unique_fd(unique_fd && other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

    unique_fd & operator=(unique_fd && other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }

    unique_fd(const unique_fd &)             = delete;
    unique_fd & operator=(const unique_fd &) = delete;

    int get() const { return fd_; }

    explicit operator bool() const { return fd_ >= 0; }

    void reset();

  private:
    int fd_ = -1;
};

}  // namespace simulator
