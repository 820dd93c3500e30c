#include "helper.h"

#include "log.h"
#include "protocol.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>

extern char ** environ;

namespace simulator {

static constexpr int    HELPER_SOCKET = 3;    // the control socket in the helper
static constexpr double START_SECONDS = 120;  // importing jaxlib from a cold disk on a busy machine

// ---- messages ----------------------------------------------------------------------------------------------------------

static bool socket_pair(unique_fd & near, unique_fd & far) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        return false;
    }
    near = unique_fd(ends[0]);
    far  = unique_fd(ends[1]);
    return true;
}

// Returns 0, or an errno.
static int send_message(int socket, const void * data, size_t size, const int * fds = nullptr, size_t n_fds = 0) {
    iovec  part        = { const_cast<void *>(data), size };
    msghdr message     = {};
    message.msg_iov    = &part;
    message.msg_iovlen = 1;
    std::vector<uint8_t> control;
    if (n_fds > 0) {
        control.resize(CMSG_SPACE(n_fds * sizeof(int)));
        message.msg_control    = control.data();
        message.msg_controllen = control.size();
        cmsghdr * header       = CMSG_FIRSTHDR(&message);
        header->cmsg_level     = SOL_SOCKET;
        header->cmsg_type      = SCM_RIGHTS;
        header->cmsg_len       = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(header), fds, n_fds * sizeof(int));
    }
    for (;;) {
        if (sendmsg(socket, &message, MSG_NOSIGNAL) >= 0) {
            return 0;
        }
        if (errno != EINTR) {
            return errno;
        }
    }
}

// `room` has MAX_MESSAGE bytes.
static outcome receive_message(int socket, std::vector<uint8_t> & room, std::vector<uint8_t> & out) {
    for (;;) {
        const ssize_t size = recv(socket, room.data(), room.size(), 0);
        if (size > 0) {
            out.assign(room.begin(), room.begin() + size);
            return outcome::answered;
        }
        if (size < 0 && errno == EINTR) {
            continue;
        }
        return size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? outcome::timed_out : outcome::lost;
    }
}

static void set_timeout(int socket, double seconds) {
    timeval time;
    time.tv_sec  = static_cast<time_t>(seconds);
    time.tv_usec = static_cast<suseconds_t>((seconds - std::floor(seconds)) * 1e6);
    if (seconds > 0 && time.tv_sec == 0 && time.tv_usec == 0) {
        time.tv_usec = 1;  // 0 means forever
    }
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
}

// ---- the process -------------------------------------------------------------------------------------------------------

static std::string python() {
    const char * name = getenv("NEURON_SIMULATOR_PYTHON");
    return name != nullptr && *name != '\0' ? name : "python3";
}

// Returns the client's environment with NEURON_SIMULATOR_PATH in front of PYTHONPATH.
static std::vector<std::string> helper_environment() {
    std::vector<std::string> out;
    const char *             path = getenv("NEURON_SIMULATOR_PATH");
    const bool               more = path != nullptr && *path != '\0';
    for (char ** variable = environ; variable != nullptr && *variable != nullptr; variable++) {
        if (!more || strncmp(*variable, "PYTHONPATH=", 11) != 0) {
            out.emplace_back(*variable);
        }
    }
    if (more) {
        const char * old = getenv("PYTHONPATH");
        out.push_back("PYTHONPATH=" + std::string(path) +
                      (old != nullptr && *old != '\0' ? ":" + std::string(old) : ""));
    }
    return out;
}

static std::vector<char *> pointers(std::vector<std::string> & strings) {
    std::vector<char *> out;
    for (auto & string : strings) {
        out.push_back(string.data());
    }
    out.push_back(nullptr);
    return out;
}

// Starts the interpreter with `socket` as its descriptor 3. Returns 0, or an errno.
static int spawn(int socket, pid_t & pid) {
    // -P: Python does not search the client's working directory for modules.
    std::vector<std::string> arguments   = { python(),   "-P",
                                             "-m",       "kernelgen.simulator",
                                             "--socket", std::to_string(HELPER_SOCKET) };
    std::vector<std::string> environment = helper_environment();

    posix_spawn_file_actions_t actions;
    posix_spawnattr_t          attributes;
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);

    // The client's standard output may be data, so the helper writes messages to standard error only.
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    if (fcntl(STDERR_FILENO, F_GETFD) < 0) {
        posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    }
    posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, socket, HELPER_SOCKET);

    // The helper has its own process group: a terminal's interrupt is meant for the client, and the helper ends with
    // the client.
    sigset_t none;
    sigset_t all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);

    const int result = posix_spawnp(&pid, arguments[0].c_str(), &actions, &attributes, pointers(arguments).data(),
                                    pointers(environment).data());
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return result;
}

static std::string describe_command(const std::string & interpreter) {
    const char * path = getenv("NEURON_SIMULATOR_PATH");
    return "'" + interpreter +
           " -m kernelgen.simulator' (NEURON_SIMULATOR_PYTHON names a Python 3.11 or later that has jaxlib, " +
           "NEURON_SIMULATOR_PATH the folder that holds the package kernelgen; now '" + (path != nullptr ? path : "") +
           "')";
}

std::shared_ptr<helper> helper::start(const std::vector<std::shared_ptr<arena>> & arenas, std::string & error) {
    static std::atomic<uint64_t> count{ 0 };

    std::shared_ptr<helper> made(new helper);
    made->number_ = ++count;
    unique_fd far;
    if (!socket_pair(made->control_, far)) {
        error = std::string("no socket: ") + strerror(errno);
        return nullptr;
    }
    // A descriptor above the numbers that the helper's descriptors get.
    unique_fd high(fcntl(far.get(), F_DUPFD_CLOEXEC, 16));
    far.reset();
    if (!high) {
        error = std::string("no socket: ") + strerror(errno);
        return nullptr;
    }
    const int failed = spawn(high.get(), made->pid_);
    if (failed != 0) {
        made->pid_ = -1;
        error      = "cannot start " + describe_command(python()) + ": " + strerror(failed);
        return nullptr;
    }
    high.reset();  // an open copy would hide the end of the helper

    std::vector<uint8_t>  message(sizeof(protocol::hello) + arenas.size() * sizeof(uint64_t));
    const protocol::hello hello = { protocol::HELLO, protocol::VERSION, static_cast<uint32_t>(arenas.size()), 0 };
    memcpy(message.data(), &hello, sizeof(hello));
    std::vector<int> fds;
    for (size_t i = 0; i < arenas.size(); i++) {
        const uint64_t size = arenas[i]->size();
        memcpy(message.data() + sizeof(hello) + i * sizeof(size), &size, sizeof(size));
        fds.push_back(arenas[i]->fd());
    }
    set_timeout(made->control_.get(), START_SECONDS);
    outcome result = outcome::lost;
    if (send_message(made->control_.get(), message.data(), message.size(), fds.data(), fds.size()) == 0) {
        std::vector<uint8_t> room(protocol::MAX_MESSAGE);
        result = receive_message(made->control_.get(), room, message);
    }
    protocol::answer answer;
    if (result == outcome::answered && message.size() >= sizeof(answer)) {
        memcpy(&answer, message.data(), sizeof(answer));
        if (answer.status == NRT_SUCCESS) {
            log(level::info, "helper", "process %d is ready", static_cast<int>(made->pid_));
            return made;
        }
        error = "the helper is not able to run: " + std::string(message.begin() + sizeof(answer), message.end());
        return nullptr;
    }
    error = "the helper " + describe_command(python());
    if (result == outcome::timed_out) {
        error += " was not ready after " + std::to_string(static_cast<int>(START_SECONDS)) + " s";
    } else {
        error += " " + made->obituary() + " before it was ready";
    }
    return nullptr;
}

helper::~helper() {
    end();
}

static std::string ending_of(int status) {
    if (WIFSIGNALED(status)) {
        return "was killed by signal " + std::to_string(WTERMSIG(status)) + " (" + strsignal(WTERMSIG(status)) + ")";
    }
    return "exited with status " + std::to_string(WEXITSTATUS(status));
}

// Closes the sockets, so that the process ends by itself, and waits for it. Called with the mutex held, or by the last owner.
void helper::end() {
    broken_ = true;
    idle_.clear();
    if (control_) {
        shutdown(control_.get(), SHUT_RDWR);
    }
    if (pid_ < 0) {
        return;
    }
    for (int tries = 0; tries < 3000; tries++) {
        int         status;
        const pid_t ended = waitpid(pid_, &status, WNOHANG);
        if (ended != 0) {
            // The client may reap children that it did not start. Then the exit status is lost, and the process ID may
            // belong to another process.
            ending_ = ended == pid_ ? ending_of(status) : "ended";
            pid_    = -1;
            return;
        }
        if (tries == 2000) {
            kill(pid_, SIGKILL);
        }
        const timespec millisecond = { 0, 1000000 };
        nanosleep(&millisecond, nullptr);
    }
    ending_ = "does not end";
    pid_    = -1;
}

std::string helper::obituary() {
    const std::lock_guard<std::mutex> lock(mutex_);
    end();
    return ending_;
}

// ---- requests ----------------------------------------------------------------------------------------------------------

lane::lane(bool & ok) {
    int ask[2];
    int answer[2];
    ok = pipe2(ask, O_CLOEXEC) == 0;
    if (!ok) {
        return;
    }
    asked_ = unique_fd(ask[0]);
    ask_   = unique_fd(ask[1]);
    ok     = pipe2(answer, O_CLOEXEC) == 0;
    if (!ok) {
        return;
    }
    answer_ = unique_fd(answer[0]);
    other_  = unique_fd(answer[1]);
    // The helper's end stays blocking.
    ok      = fcntl(ask_.get(), F_SETFL, O_NONBLOCK) == 0;
}

// Waits until a descriptor is ready or its other end is closed; returns false after the deadline.
static bool wait_for(pollfd * fds, nfds_t count, std::chrono::steady_clock::time_point deadline, bool forever) {
    for (;;) {
        const auto left =
            std::chrono::duration_cast<std::chrono::microseconds>(deadline - std::chrono::steady_clock::now());
        const timespec time  = { left.count() / 1000000, left.count() % 1000000 * 1000 };
        const timespec none  = { 0, 0 };
        const int      ready = ppoll(fds, count, forever ? nullptr : left.count() > 0 ? &time : &none, nullptr);
        if (ready >= 0) {
            return ready > 0;
        }
    }
}

// The number of polls for an answer before the client sleeps: some 30 us. The helper computes a small kernel within
// that time, and an idle processor takes longer to wake up.
static constexpr int LOOKS = 60;

// Polls until a descriptor is ready, at most LOOKS times.
static void look_for(int descriptor) {
    pollfd fds[] = {
        { descriptor, POLLIN, 0 }
    };
    for (int i = 0; i < LOOKS && poll(fds, 1, 0) <= 0; i++) {
        sched_yield();  // the helper may be waiting for this processor
    }
}

bool lane::send(const std::vector<uint8_t> & message) {
    uint32_t size    = static_cast<uint32_t>(message.size());
    size_t   done    = 0;
    iovec    parts[] = {
        { &size,                                 sizeof(size)   },
        { const_cast<uint8_t *>(message.data()), message.size() }
    };
    // Most messages fit into the pipe at once.
    ssize_t written = writev(ask_.get(), parts, 2);
    while (done + static_cast<size_t>(std::max<ssize_t>(written, 0)) < sizeof(size) + message.size()) {
        if (written < 0 && errno != EINTR && errno != EAGAIN) {
            return false;
        }
        if (written < 0 && errno == EAGAIN) {
            pollfd fds[] = {
                { ask_.get(),    POLLOUT, 0 },
                { answer_.get(), 0,       0 }
            };
            wait_for(fds, 2, {}, true);
            if ((fds[1].revents & POLLHUP) != 0) {
                return false;
            }
        }
        done += static_cast<size_t>(std::max<ssize_t>(written, 0));
        if (done < sizeof(size)) {
            written = write(ask_.get(), reinterpret_cast<uint8_t *>(&size) + done, sizeof(size) - done);
        } else {
            const size_t at = done - sizeof(size);
            written         = write(ask_.get(), message.data() + at, message.size() - at);
        }
    }
    return true;
}

outcome lane::receive(std::vector<uint8_t> & message, double timeout) {
    using clock         = std::chrono::steady_clock;
    const auto deadline = clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(timeout * 1e9));
    size_t     have     = 0;
    uint32_t   size     = 0;
    look_for(answer_.get());
    for (;;) {
        if (timeout > 0) {
            pollfd fds[] = {
                { answer_.get(), POLLIN, 0 }
            };
            if (!wait_for(fds, 1, deadline, false)) {
                return outcome::timed_out;
            }
        }
        const ssize_t got = read(answer_.get(), room_.data() + have, room_.size() - have);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            // The helper did not begin a request that it did not read.
            int left = 0;
            return ioctl(asked_.get(), FIONREAD, &left) == 0 && left > 0 ? outcome::not_sent : outcome::lost;
        }
        have += static_cast<size_t>(got);
        if (have >= sizeof(size)) {
            memcpy(&size, room_.data(), sizeof(size));
            if (size > room_.size() - sizeof(size)) {
                return outcome::lost;
            }
            if (have >= sizeof(size) + size) {
                message.assign(room_.begin() + sizeof(size), room_.begin() + sizeof(size) + size);
                return outcome::answered;
            }
        }
    }
}

outcome helper::new_lane(std::unique_ptr<lane> & out) {
    bool ok;
    out = std::make_unique<lane>(ok);
    if (!ok) {
        log(level::error, "helper", "no pipe: %s", strerror(errno));
        return outcome::refused;
    }
    const uint32_t operation = protocol::LANE;
    const bool     sent      = out->pass([&](const int * fds, size_t count) {
        return send_message(control_.get(), &operation, sizeof(operation), fds, count) == 0;
    });
    return sent ? outcome::answered : outcome::not_sent;
}

void helper::send_signal(int signal) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pid_ > 0) {
        kill(pid_, signal);
    }
}

outcome helper::call(std::vector<uint8_t> & message, double timeout) {
    std::unique_ptr<lane> used;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (broken_) {
            return outcome::not_sent;
        }
        if (!idle_.empty()) {
            used = std::move(idle_.back());
            idle_.pop_back();
        } else {
            const outcome made = new_lane(used);
            broken_            = made == outcome::not_sent;
            if (made != outcome::answered) {
                return made;
            }
        }
    }
    const bool last = doomed_.exchange(false);
    if (last) {
        send_signal(SIGSTOP);  // no answer before it is killed
    }
    const bool sent = used->send(message);
    if (last) {
        send_signal(SIGKILL);
    }
    if (!sent) {
        broken_ = true;
        return outcome::not_sent;
    }
    outcome result = used->receive(message, timeout);
    if ((result == outcome::answered && message.size() < sizeof(protocol::answer)) ||
        (result == outcome::not_sent && last)) {
        result = outcome::lost;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (result == outcome::answered) {
        if (!broken_) {
            idle_.push_back(std::move(used));
        }
    } else {
        broken_ = true;
    }
    return result;
}

}  // namespace simulator
