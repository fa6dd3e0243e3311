// A team is the threads of a parallel region. They share out loops, and wait for one another after each.
//
// OpenMP's own barriers spin for long, since it cannot know how soon a thread comes. These spin for as long as a stage
// of a layer may last, then sleep. Where other processes have the cores, a thread is taken off its core in mid-stage, and
// all others wait until its turn comes again. Once that has cost a thread much of a call, it leaves the team, whose
// others need not wait for it again; it must not read what they write from then on. The engine then takes fewer threads
// for its next steps (engine/torch_settings.py).

#pragma once

#include <omp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#ifndef LATE_NS                                // a test defines all three so that threads leave at once
#define SPIN_NS 200000                         // a core that sleeps takes up to half as long to wake up
#define LATE_NS 1000000                        // a thread leaves once it was off its core for longer
#define LATE_PART 4                            // and for more than this part of the call
#endif
#define SPINS 64                               // between two looks at the clock
#define MOST_SHARES 4                          // of a thread in a loop
#define MOST_TURNS 12                          // of a share

// What the threads of a team share. CREW begins a call.
typedef struct {
    int64_t begun;                             // ns
    atomic_int left;                           // threads that have left
    atomic_int arrived, round, asleep;
    atomic_llong next;                         // of the loop that is under way
} Crew;

#define CREW {.begun = team_now(CLOCK_MONOTONIC)}

// A thread's own view.
typedef struct {
    Crew *crew;
    int size, has_left;
    int64_t cpu, slept;                        // ns on a core when it began, and asleep since
} Team;

static inline int64_t team_now(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// The first thing that every thread of a region does.
static inline Team team_begin(Crew *crew) {
    int size = omp_get_num_threads();
    return (Team){crew, size, 0, size > 1 ? team_now(CLOCK_THREAD_CPUTIME_ID) : 0, 0};
}

static inline int team_threads(const Team *team) { return team->size - team->crew->left; }

// Returns the first of `count` turns of a loop that are this thread's now; none are, once it has left. A loop ends with
// team_wait.
static inline int64_t team_take(Team *team, int64_t count) {
    return team->has_left ? INT64_MAX / 2 : atomic_fetch_add(&team->crew->next, count);
}

// How many turns of a loop to take at a time: asking takes half a microsecond while others ask.
static inline int64_t team_share(const Team *team, int64_t turns) {
    int64_t share = turns / (MOST_SHARES * team_threads(team));
    return share < 1 ? 1 : share < MOST_TURNS ? share : MOST_TURNS;
}

// A loop over `turns` turns, of which each thread takes some at a time. It ends with team_wait.
#define TEAM_FOR(team, turn, turns)                                                                       \
    for (int64_t share_ = team_share(team, turns), first_; (first_ = team_take(team, share_)) < (turns);) \
        for (int64_t turn = first_; turn < first_ + share_ && turn < (turns); turn++)

static inline void team_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline void team_sleep(Team *team, int round) {
    Crew *crew = team->crew;
    int64_t begun = team_now(CLOCK_MONOTONIC);
    atomic_fetch_add(&crew->asleep, 1);
    while (atomic_load(&crew->round) == round) {
#if defined(__linux__)
        syscall(SYS_futex, &crew->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
#else
        sched_yield();
#endif
    }
    atomic_fetch_sub(&crew->asleep, 1);
    team->slept += team_now(CLOCK_MONOTONIC) - begun;
}

// Whether others had this thread's core for much of the call.
static inline int team_is_late(const Team *team) {
    int64_t time = team_now(CLOCK_MONOTONIC) - team->crew->begun;
    int64_t late = time - team->slept - (team_now(CLOCK_THREAD_CPUTIME_ID) - team->cpu);
    return late > LATE_NS && late * LATE_PART > time;
}

// The last thread to arrive begins the next round; while others sleep, it asks whether it holds them up.
static inline void team_turn(Team *team, int round) {
    Crew *crew = team->crew;
    if (atomic_load(&crew->asleep)) crew->left += team->has_left = team_is_late(team);
    atomic_store(&crew->arrived, 0);
    atomic_store(&crew->next, 0);
    atomic_store(&crew->round, round + 1);
#if defined(__linux__)
    // One may have fallen asleep since.
    if (atomic_load(&crew->asleep)) syscall(SYS_futex, &crew->round, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

// Wait for all threads; what they wrote can be read then.
static inline void team_wait(Team *team) {
    Crew *crew = team->crew;
    if (team->has_left) return;
    // Asked first: once all have arrived, one of them may leave.
    int threads = team_threads(team), round = atomic_load(&crew->round);
    if (atomic_fetch_add(&crew->arrived, 1) + 1 == threads) {
        team_turn(team, round);
        return;
    }
    int64_t begun = 0;
    for (int spins = 1; atomic_load(&crew->round) == round; spins++) {
        team_relax();
        if (spins % SPINS) continue;
        int64_t now = team_now(CLOCK_MONOTONIC);
        if (!begun) begun = now;
        if (now - begun > SPIN_NS) team_sleep(team, round);
    }
}
