# cmake --install --component program: gradwire and gradwire-bench, their man pages, and their completion for
# bash and zsh. The programs write the pages and the completion themselves, from their flags.
include(GNUInstallDirs)

# Debian's zsh reads the completion of packages from another folder. The prefix is known when installing.
install(CODE "set(zsh_folder site-functions)
  if(CMAKE_INSTALL_PREFIX STREQUAL \"/usr\")
    set(zsh_folder vendor-completions)
  endif()" COMPONENT program)
set(data_dir ${CMAKE_INSTALL_DATADIR}/gradwire)
set(private_dir ${CMAKE_INSTALL_LIBDIR}/gradwire)
set(bash_dir ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
set(zsh_dir ${CMAKE_INSTALL_DATADIR}/zsh/\${zsh_folder})
gradwire_folders(program ${CMAKE_INSTALL_BINDIR} ${private_dir} ${data_dir} ${bash_dir} ${zsh_dir}
  ${CMAKE_INSTALL_MANDIR}/man1)

# Where the programs look for Python programs (trainer/cli/report.cpp) and their private library.
install(TARGETS gradwire gradwire-bench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
install(TARGETS gradwire_blas LIBRARY DESTINATION ${private_dir} COMPONENT program)
# $ORIGIN is unknown where /proc is not mounted. Packages have the prefix /usr.
set_target_properties(gradwire gradwire-bench PROPERTIES
  INSTALL_RPATH "$ORIGIN/../${private_dir};/usr/${private_dir}")
install(DIRECTORY trainer/report trainer/plan/clusters DESTINATION ${data_dir} COMPONENT program
  PATTERN __pycache__ EXCLUDE)

set(manual ${CMAKE_BINARY_DIR}/manual)
set(pages)
foreach(program gradwire gradwire-bench)
  add_custom_command(OUTPUT ${manual}/${program}.bash ${manual}/_${program} ${manual}/${program}/${program}.1
    COMMAND ${CMAKE_COMMAND} -E rm -rf ${manual}/${program}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${manual}
    COMMAND ${program} man ${manual}/${program}
    COMMAND ${program} completion bash > ${manual}/${program}.bash
    COMMAND ${program} completion zsh > ${manual}/_${program}
    DEPENDS ${program}
    COMMENT "Writing the man pages and the completion of ${program}" VERBATIM)
  list(APPEND pages ${manual}/${program}/${program}.1)
  install(DIRECTORY ${manual}/${program}/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT program)
  install(FILES ${manual}/${program}.bash RENAME ${program}
    DESTINATION ${bash_dir} COMPONENT program)
  install(FILES ${manual}/_${program} DESTINATION ${zsh_dir} COMPONENT program)
endforeach()
# An installation needs the pages, so a build of all targets writes them. Sanitizer builds are not installed.
if(NOT GRADWIRE_SANITIZE)
  set(in_all ALL)
endif()
add_custom_target(manual ${in_all} DEPENDS ${pages})
