// The barriers of ranks, nrt_build_global_comm and nrt_barrier.

#include "ranks.h"

#include "../../nrt/targets.h"
#include "log.h"
#include "runtime.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>

namespace simulator {

static std::chrono::steady_clock::time_point after(double seconds) {
    return std::chrono::steady_clock::now() +
           std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, 1e9) * 1e9));
}

// The caller holds the mutex.
void group::end(round & ended, NRT_STATUS status) {
    ended.over   = true;
    ended.status = status;
    if (current_.get() == &ended) {
        current_ = std::make_shared<round>(count_);
    }
    changed_.notify_all();
}

// The caller holds the mutex.
std::string group::missing(const round & own) const {
    std::string text;
    for (uint32_t i = 0; i < count_; i++) {
        if (!own.here[i]) {
            text += (text.empty() ? "" : ", ") + std::to_string(i);
        }
    }
    return text;
}

NRT_STATUS group::meet(uint32_t rank, const void * what, double seconds, const action & act, const char * where) {
    const auto                   deadline = after(seconds);
    std::unique_lock<std::mutex> lock(mutex_);
    // Another thread of the same rank may be in this round.
    while (failed_ == NRT_SUCCESS && current_->here[rank]) {
        if (changed_.wait_until(lock, deadline) == std::cv_status::timeout && current_->here[rank]) {
            break;
        }
    }
    if (failed_ != NRT_SUCCESS) {
        log(level::error, where, "these ranks did not all come before, and do not meet again");
        return failed_;
    }
    const std::shared_ptr<round> own = current_;
    if (own->here[rank]) {
        log(level::error, where, "rank %u waits for itself: the execution before is not done after %g s", rank,
            seconds);
        return NRT_TIMEOUT;
    }
    own->brought[rank] = what;
    own->here[rank]    = true;
    if (++own->arrived == count_) {
        own->held = true;
        current_  = std::make_shared<round>(count_);
        changed_.notify_all();
        lock.unlock();
        NRT_STATUS status = NRT_FAIL_HOST_MEM_ALLOC;
        try {
            status = act(own->brought);
        } catch (const std::exception & error) {
            log(level::error, where, "%s", error.what());
        }
        lock.lock();
        end(*own, status);
        return status;
    }
    while (!own->over && !own->held) {
        if (changed_.wait_until(lock, deadline) == std::cv_status::timeout && !own->over && !own->held) {
            failed_ = left_.empty() ? NRT_TIMEOUT : NRT_EXEC_HW_ERR_COLLECTIVES;
            log(level::error, where, "rank %u of %u waited for rank %s for %g s%s", rank, count_, missing(*own).c_str(),
                seconds, left_.empty() ? "" : ", which failed");
            end(*own, failed_);
        }
    }
    changed_.wait(lock, [&] { return own->over; });
    return own->status;
}

void group::leave(uint32_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_.push_back(rank);
}

void group::pause(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, after(seconds), [this] { return failed_ != NRT_SUCCESS; });
}

void group::close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_ = NRT_CLOSED;
    end(*current_, failed_);
}

std::shared_ptr<group> ranks::join(kind kind, uint32_t rank, uint32_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto                              found = std::find_if(joining_.begin(), joining_.end(), [&](const joining & one) {
        return one.what == kind && one.members->count() == count && !one.joined[rank];
    });
    if (found == joining_.end()) {
        found = joining_.insert(joining_.end(), { kind, std::make_shared<group>(count), std::vector<bool>(count) });
        all_.erase(std::remove_if(all_.begin(), all_.end(), [](const auto & one) { return one.expired(); }),
                   all_.end());
        all_.push_back(found->members);
        if (closed_) {
            found->members->close();
        }
    }
    const std::shared_ptr<group> members = found->members;
    found->joined[rank]                  = true;
    if (std::find(found->joined.begin(), found->joined.end(), false) == found->joined.end()) {
        joining_.erase(found);
    }
    return members;
}

void ranks::give_up(const std::shared_ptr<group> & group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    joining_.remove_if([&](const joining & one) { return one.members == group; });
}

bool ranks::set_communicator(uint32_t core, communicator made) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return communicators_.emplace(core, made).first->second == made;
}

bool ranks::communicator_of(uint32_t core, communicator & out) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto                        found = communicators_.find(core);
    if (found == communicators_.end()) {
        return false;
    }
    out = found->second;
    return true;
}

void ranks::close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    for (const auto & one : all_) {
        if (const auto members = one.lock()) {
            members->close();
        }
    }
}

// Returns whether a text has the form ADDRESS:PORT.
static bool is_address(const std::string & text) {
    const size_t colon = text.rfind(':');
    const char * port  = colon == std::string::npos ? "" : text.c_str() + colon + 1;
    char *       end;
    const long   number = strtol(port, &end, 10);
    return colon > 0 && *port != '\0' && *end == '\0' && number > 0 && number < 65536;
}

NRT_STATUS check_ranks(runtime & rt, int32_t vnc, uint32_t rank, uint32_t count, const char * where) {
    if (count == 0 || rank >= count) {
        log(level::error, where, "device %u of %u", rank, count);
        return NRT_INVALID;
    }
    if (count > rt.config.total) {
        log(level::error, where, "%u devices are wanted, and the instance has %u", count, rt.config.total);
        return NRT_LOAD_NOT_ENOUGH_NC;
    }
    if (count > rt.cores()) {
        log(level::error, where,
            "%u devices are wanted, and this process has %u of the instance's %u: the simulator has no ranks in "
            "several "
            "processes",
            count, rt.cores(), rt.config.total);
        return NRT_FAILURE;
    }
    if (vnc >= 0 && static_cast<uint32_t>(vnc) >= rt.cores()) {
        log(level::error, where, "core %d is wanted, %u are visible", static_cast<int>(vnc), rt.cores());
        return NRT_LOAD_NOT_ENOUGH_NC;
    }
    const std::string target = rt.config.profile != nullptr ? neuron_target_of_family(rt.config.profile->family) : "";
    const std::string why    = rt.config.strict ? neuron_rank_error(target, count, 0) : "";
    if (!why.empty()) {
        log(level::error, where, "%s", why.c_str());
        return NRT_INVALID;
    }
    if (rt.config.strict && !is_address(rt.config.root_comm)) {
        log(level::error, where,
            "collectives need NEURON_RT_ROOT_COMM_ID=ADDRESS:PORT before nrt_init, where the ranks meet; it is '%s'",
            rt.config.root_comm.c_str());
        return NRT_FAILURE;
    }
    const uint32_t core = vnc < 0 ? rank : static_cast<uint32_t>(vnc);
    if (rt.core_states[core].wedged || rt.faults.strikes("wedged")) {
        log(level::error, where, "collectives of core %u failed before: start this process again%s", core,
            rt.core_states[core].wedged ? "" : ", after a reboot (NEURON_SIMULATOR_FAULT=wedged)");
        return NRT_TIMEOUT;
    }
    return core_status(rt, core, where);
}

bool are_cores_of_ranks(const runtime & rt, const std::vector<uint32_t> & cores, const char * where) {
    for (size_t i = 0; i < cores.size(); i++) {
        for (size_t k = 0; k < i; k++) {
            if (cores[i] == cores[k]) {
                log(level::error, where, "ranks %zu and %zu are both on core %u", k, i, cores[i]);
                return false;
            }
        }
    }
    for (size_t rank = 0; rt.config.strict && rank < cores.size(); rank++) {
        const uint32_t core = rt.config.visible[cores[rank]];
        if (core % cores.size() != rank || core - rank != rt.config.visible[cores[0]]) {
            log(level::error, where,
                "rank %zu of %zu is on core %u of the machine: ranks are on cores that follow one another, and the "
                "first "
                "core is a multiple of their number",
                rank, cores.size(), core);
            return false;
        }
    }
    return true;
}

// Waits until all ranks have made the same call, each on its own core.
static NRT_STATUS meet_once(runtime &           rt,
                            ranks::kind         kind,
                            int32_t             vnc,
                            ranks::communicator who,
                            double              seconds,
                            const char *        where) {
    const uint32_t   core    = vnc < 0 ? who.first : static_cast<uint32_t>(vnc);
    const auto       members = rt.ranks.join(kind, who.first, who.second);
    const NRT_STATUS status  = members->meet(
        who.first, &core, seconds,
        [&](const std::vector<const void *> & brought) {
            std::vector<uint32_t> cores;
            for (const void * one : brought) {
                cores.push_back(*static_cast<const uint32_t *>(one));
            }
            return are_cores_of_ranks(rt, cores, where) ? NRT_SUCCESS : NRT_INVALID;
        },
        where);
    if (status != NRT_SUCCESS) {
        rt.ranks.give_up(members);
    }
    return status;
}

}  // namespace simulator

using namespace simulator;

NRT_STATUS nrt_build_global_comm(int32_t vnc, uint32_t g_device_id, uint32_t g_device_count) {
    const char * const where = "nrt_build_global_comm";
    return with_runtime(where, [&](runtime & rt) {
        NRT_STATUS status = check_ranks(rt, vnc, g_device_id, g_device_count, where);
        if (status != NRT_SUCCESS) {
            return status;
        }
        const ranks::communicator who(g_device_id, g_device_count);
        status              = meet_once(rt, ranks::COMMUNICATOR, vnc, who, rt.config.load_timeout, where);
        const uint32_t core = vnc < 0 ? g_device_id : static_cast<uint32_t>(vnc);
        if (status == NRT_SUCCESS && !rt.ranks.set_communicator(core, who)) {
            return invalid(where, "the core has another communicator already");
        }
        return status;
    });
}

NRT_STATUS nrt_barrier(int32_t vnc, uint32_t g_device_id, uint32_t g_device_count) {
    const char * const where = "nrt_barrier";
    return with_runtime(where, [&](runtime & rt) {
        NRT_STATUS status = check_ranks(rt, vnc, g_device_id, g_device_count, where);
        if (status != NRT_SUCCESS) {
            return status;
        }
        status = meet_once(rt, ranks::BARRIER, vnc, { g_device_id, g_device_count }, rt.config.rank_timeout(), where);
        if (status == NRT_TIMEOUT) {
            rt.core_states[vnc < 0 ? g_device_id : static_cast<uint32_t>(vnc)].wedged = true;
        }
        return status;
    });
}
