/* A stand-in for pyxis, by which srun opens an image: SLURM loads it as it loads that, with the options that we use.

   test_pyxis.py says what an image is here. A task sees that and the mounts alone. As with pyxis, variables of the
   image come before those of the job, unless --container-env names them. */

#define _GNU_SOURCE
#include <sched.h>
#include <slurm/spank.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis, 1);

static char *given[4] = {"", "", "", ""};
static const char *names[4] = {"container-image", "container-mounts", "container-workdir", "container-env"};

static int keep(int number, const char *text, int remote) {
    given[number] = strdup(text);
    return 0;
}

int slurm_spank_init(spank_t spank, int count, char **words) {
    for (int i = 0; i < 4; i++) {
        struct spank_option option = {(char *)names[i], "TEXT", "[pyxis] a stand-in", 1, i, keep};
        if (spank_option_register(spank, &option) != ESPANK_SUCCESS) return -1;
    }
    return 0;
}

int slurm_spank_task_init_privileged(spank_t spank, int count, char **words) {
    if (!*given[0]) return 0;
    setenv("image", given[0], 1);
    setenv("mounts", given[1], 1);
    if (unshare(CLONE_NEWNS) || system(words[0])) {
        slurm_error("pyxis: couldn't start container %s", given[0]);
        return -1;
    }
    if (chroot("/mnt") || chdir(given[2])) {
        slurm_error("pyxis: couldn't chdir to %s", given[2]);
        return -1;
    }
    /* The last three are what enroot's hook for PyTorch sets. */
    const char *image[] = {"PATH", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"};
    const char *values[] = {"/opt/venv/bin:/bin", "nowhere", "1", "7"};
    for (int i = 0; i < 4; i++)
        if (!strstr(given[3], image[i])) spank_setenv(spank, image[i], values[i], 1);
    return 0;
}
